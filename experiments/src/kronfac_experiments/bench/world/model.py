"""A decoder-only transformer of any size, without storage: only its shapes are wanted."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention and a gated perceptron, each after a normalisation and beside a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_gate = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """The tokens (sequences, tokens, width) after this layer."""
        a = self.before_attention(h)
        q, k, v = (
            f(a).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        a = self.before_gate(h)
        gated: Tensor = h + self.down(functional.silu(self.gate(a)) * self.up(a))
        return gated


class Decoder(nn.Module):
    """Logits of the next token, (sequences · tokens, vocabulary)."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of tokens (sequences, tokens)."""
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return logits.flatten(0, 1)


def decoder(
    width: int, depth: int, heads: int, hidden: int, vocabulary: int, sequences: int, tokens: int
) -> tuple[Decoder, Tensor]:
    """The model and a mini-batch, both on the `meta` device."""
    with torch.device("meta"):
        model = Decoder(width, depth, heads, hidden, vocabulary)
        return model, torch.zeros(sequences, tokens, dtype=torch.long)

"""A small language model, and sequences of several lengths that count up by 1, 2 or 3."""

import torch
from torch import Tensor, nn

from tests.networks.libraries import transformers

TOKENS, LENGTH, BATCH = 17, 10, 16
PADDING = -100


def model() -> nn.Module:
    """GPT-2 without dropout, the same each time."""
    torch.manual_seed(0)
    config = transformers().GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    gpt2 = transformers().GPT2LMHeadModel(config)
    gpt2.loss_type = "ForCausalLM"  # or the Trainer counts a target for the first token too
    return gpt2


def rows(count: int = 4 * BATCH) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(TOKENS, (count, 1), generator=generator)
    by = torch.randint(1, 4, (count, 1), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
    ids = (start + by * torch.arange(LENGTH)) % TOKENS
    mask = torch.arange(LENGTH) < lengths
    labels = ids.where(mask, torch.tensor(PADDING))
    columns = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    return [{name: column[n] for name, column in columns.items()} for n in range(count)]


def collate(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in some]) for name in some[0]}


def batches() -> list[dict[str, Tensor]]:
    every = rows()
    return [collate(every[n : n + BATCH]) for n in range(0, len(every), BATCH)]


def assert_same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    """The same parameters, and other ones than before training."""
    pairs = zip(one.parameters(), other.parameters(), model().parameters(), strict=True)
    for p, q, start in pairs:
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert not torch.equal(p, start)

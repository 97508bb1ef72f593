"""The networks of the race: plain PyTorch, as people write them, nothing made for K-FAC.

Classifiers return logits (N, classes), the autoencoder logits of pixels (N, 784), the U-Net images, and
language models (N, symbols, T), the layout that `nn.CrossEntropyLoss` wants for a class at each place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cnn() -> nn.Sequential:
    """Two convolutions with pooling, two linear layers; images (N, 1, 28, 28)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm beside a shortcut, as in He et al. (2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """From (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet() -> nn.Sequential:
    """Three stages of 8, 16 and 32 channels, one residual block each; images (N, 1, 28, 28)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        ResidualBlock(8, 8, stride=1),
        ResidualBlock(8, 16, stride=2),
        ResidualBlock(16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels with BatchNorm beside a shortcut, as in ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_normalised(inputs, width, 1, 1),
            nn.ReLU(),
            *_normalised(width, width, 3, stride),
            nn.ReLU(),
            *_normalised(width, 4 * width, 1, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(*_normalised(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """From (N, inputs, H, W) to (N, 4 width, H / stride, W / stride)."""
        return F.relu(self.layers(x) + self.shortcut(x))


def _normalised(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def resnet50() -> nn.Sequential:
    """ResNet-50 for images (N, 3, 224, 224) of 1,000 classes, whose steps are estimated and not taken."""
    modules: list[nn.Module] = [*_normalised(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for k in range(blocks):
            modules.append(Bottleneck(inputs, width, 2 if k == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def conv_autoencoder(code: int = 30) -> nn.Sequential:
    """Strided convolutions to a code of 30 numbers, as in the paper's MNIST autoencoder, and back."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, code),
        nn.Linear(code, 32 * 7 * 7),
        nn.ReLU(),
        nn.Unflatten(1, (32, 7, 7)),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Flatten(),
    )


class Attention(nn.Module):
    """Attention by torch's fused kernel, to the tokens so far if it is causal."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (N, T, width) to the same shape."""
        cases, places, width = x.shape
        heads = self.qkv(x).view(cases, places, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (N, heads, T, width / heads) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        mixed = self.out(mixed.transpose(1, 2).reshape(cases, places, width))
        return mixed  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From (N, T, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only transformer with learned positions, initialised as GPT-2.

    Normal weights of deviation 0.02, divided by √(2 layers) where they feed a shortcut; biases 0.
    """

    def __init__(
        self,
        symbols: int,
        context: int,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
                continue
            feeds_shortcut = name.endswith(("attention.out.weight", "perceptron.2.weight"))
            nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if feeds_shortcut else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, symbols, T) of the next character from characters (N, T)."""
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


class RecurrentLanguageModel(nn.Module):
    """Embedding, one LSTM or GRU layer, a linear head; every window starts from the state 0."""

    def __init__(
        self,
        layer: type[nn.LSTM] | type[nn.GRU],
        symbols: int,
        embedded: int = 64,
        width: int = 256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, embedded)
        self.layer = layer(embedded, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, symbols, T) of the next character from characters (N, T)."""
        hidden, _ = self.layer(self.tokens(x))
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def tabular(features: int, classes: int, width: int = 256) -> nn.Sequential:
    """Three hidden layers with LayerNorm and dropout 0.1."""
    modules: list[nn.Module] = []
    for inputs in (features, width, width):
        modules += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*modules, nn.Linear(width, classes))


class ViT(nn.Module):
    """A vision transformer: images (N, 1, 28, 28) in patches, learned positions, mean of the tokens."""

    def __init__(self, patch: int = 4, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (28 // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, causal=False) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        hidden = self.norm(self.blocks(tokens + self.positions))
        logits: Tensor = self.head(hidden.mean(dim=1))
        return logits


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trained product of low rank that starts at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        outputs: Tensor = self.layer(x) + self.up(self.down(x))
        return outputs


def vit_lora(rank: int = 8) -> ViT:
    """A frozen vision transformer with adapters at every linear layer of its blocks, and a trained head."""
    model = ViT().requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Adapted(child, rank))
    model.head.requires_grad_(True)
    return model


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Three scales with shortcuts between the way down and the way up; it returns the noise removed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = _double_convolution(1, width)
        self.down2 = _double_convolution(width, 2 * width)
        self.bottom = _double_convolution(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = _double_convolution(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = _double_convolution(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """From noisy images (N, 1, H, W) to clean ones; H and W are multiples of 4."""
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        hidden = self.bottom(F.max_pool2d(coarse, 2))
        hidden = self.join2(torch.cat([self.up2(hidden), coarse], dim=1))
        hidden = self.join1(torch.cat([self.up1(hidden), fine], dim=1))
        cleaned: Tensor = x - self.out(hidden)
        return cleaned

"""Networks as people write them train with every default: half of the initial loss in a few steps."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.networks.libraries import timm
from tests.networks.test_families import FAMILIES
from tests.networks.training import (
    CLASSES,
    FEW,
    PADDING,
    STEPS,
    VOCABULARY,
    assert_moved,
    assert_trains,
    images,
    padded,
    tokens,
    train,
)

LLAMA = {"hidden_size": 64, "intermediate_size": 128}
VIT = {"image_size": 16, "patch_size": 4}


class LanguageModel(nn.Module):
    """Embedding, two layers of an LSTM with dropout, head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class Classifier(nn.Module):
    """torch's own encoder: packed projections, and a fused path in `eval()`."""

    def __init__(self, width: int = 32, length: int = 10, norm_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.encoder(self.embedding(ids) + self.position, src_key_padding_mask=padding)
        return self.head(h[:, 0])


class UNet(nn.Module):
    """A class for every pixel; libraries that have one are larger than all else that the tests install."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, width), _block(width, 2 * width)])
        self.middle = _block(2 * width, 4 * width)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * d, d, 2, 2) for d in (2 * width, width))
        self.up = nn.ModuleList([_block(4 * width, 2 * width), _block(2 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            x = down(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skipped.pop(), grow(x)], dim=1))
        return self.head(x)


def _block(d_in: int, d_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for d in (d_in, d_out):
        layers += [nn.Conv2d(d, d_out, 3, padding=1), nn.BatchNorm2d(d_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def discs(examples: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Bright discs in noise; a frame that is ignored."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(size // 4, 3 * size // 4, (examples, 2, 1, 1))
    squared = (y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2
    labels = (squared < 16).long() + (squared < 4).long()
    image = torch.randn(examples, 3, size, size)
    image[:, 0] += 2 * labels
    labels[:, :1] = 255
    return image, labels


Batch = dict[str, Tensor]


def words(examples: int, length: int = 10) -> Batch:
    return {"ids": tokens(examples, length), "y": torch.arange(examples) % CLASSES}


def pictures(examples: int, size: int = 16) -> Batch:
    x, y = images(examples, size)
    return {"x": x, "y": y}


def pixels(examples: int, size: int = 16) -> Batch:
    x, y = discs(examples, size)
    return {"x": x, "y": y}


def inside(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def classify(model: nn.Module, batch: Batch) -> Tensor:
    z = model(batch.get("ids", batch.get("x")))
    return functional.cross_entropy(getattr(z, "logits", z), batch["y"], ignore_index=255)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch["ids"]
    z = model(ids[:, :-1])
    return functional.cross_entropy(getattr(z, "logits", z).transpose(1, 2), ids[:, 1:])


def with_padding(model: nn.Module, batch: Batch) -> Tensor:
    z = model(batch["input_ids"], padding=batch["attention_mask"] == 0)
    return functional.cross_entropy(z, torch.arange(len(z)) % CLASSES)


@dataclass(frozen=True)
class Case:
    """A network, a mini-batch of it and a loss; both in `train()` and in `eval()`, or in one of them."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    modes: tuple[bool, ...] = (True, False)
    steps: int = FEW


def gpt2(tied: bool) -> nn.Module:
    return FAMILIES["gpt2"].build(tie_word_embeddings=tied)


def resnet() -> nn.Module:
    """ResNet-18 with narrow stages."""
    return timm().create_model("resnet18", channels=(8, 16, 16, 16), num_classes=CLASSES)


def vit(dropout: float) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return FAMILIES["vit"].build(**VIT, **rates)


def small_images() -> Batch:
    x, y = images(8)
    return {"pixel_values": x, "labels": y}


TRAIN, EVAL = (True,), (False,)
CASES = {
    "Llama": Case(FAMILIES["llama"].build, lambda: padded(tokens(4)), inside, TRAIN),
    "Llama, tied": Case(
        lambda: FAMILIES["llama"].build(tie_word_embeddings=True),
        lambda: padded(tokens(4)),
        inside,
        TRAIN,
    ),
    "Llama, loss outside": Case(FAMILIES["llama"].build, lambda: words(4), next_token, EVAL),
    "LSTM": Case(LanguageModel, lambda: words(4), next_token),
    "encoder": Case(Classifier, lambda: words(8), classify),
    "encoder, norm first": Case(lambda: Classifier(norm_first=True), lambda: words(8), classify),
    "encoder with padding": Case(Classifier, lambda: padded(tokens(8)), with_padding, TRAIN),
    "U-Net": Case(UNet, lambda: pixels(4), classify, TRAIN),
    "U-Net in eval()": Case(UNet, lambda: pixels(4), classify, EVAL, 2 * FEW),
    "ViT": Case(lambda: vit(0.0), small_images, inside, TRAIN),
    "ViT with dropout": Case(lambda: vit(0.1), small_images, inside, TRAIN),
    "ViT, loss outside": Case(lambda: vit(0.0), lambda: pictures(8), classify, EVAL),
}
WIDER = {
    "GPT-2, tied": Case(lambda: gpt2(True), lambda: padded(tokens(8)), inside),
    "GPT-2, untied": Case(lambda: gpt2(False), lambda: padded(tokens(8)), inside),
    "Llama": Case(
        lambda: FAMILIES["llama"].build(**LLAMA, attn_implementation="eager"),
        lambda: padded(tokens(32, 16)),
        inside,
        TRAIN,
    ),
    "Llama, fused": Case(
        lambda: FAMILIES["llama"].build(**LLAMA, attn_implementation="sdpa"),
        lambda: padded(tokens(32, 16)),
        inside,
        TRAIN,
    ),
    "LSTM": Case(lambda: LanguageModel(64), lambda: words(32, 16), next_token, TRAIN),
    "encoder": Case(lambda: Classifier(64, 16), lambda: words(64, 16), classify, TRAIN),
    "U-Net": Case(lambda: UNet(8), lambda: pixels(8, 32), classify, TRAIN),
    # With eight images its last stage would normalise over eight numbers, a loss that is hardly smooth.
    "ResNet": Case(resnet, lambda: pictures(32, 32), classify, TRAIN),
    "ResNet in eval()": Case(resnet, lambda: pictures(16, 32), classify, EVAL),
    "ViT of timm": Case(
        lambda: timm().create_model(
            "vit_tiny_patch16_224",
            img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=CLASSES,
        ),
        lambda: pictures(32, 32),
        classify,
        TRAIN,
    ),
}  # fmt: skip


def variants(cases: dict[str, Case]) -> pytest.MarkDecorator:
    named = {
        f"{name}, {'train' if training else 'eval'}": (case, training)
        for name, case in cases.items()
        for training in case.modes
    }
    return pytest.mark.parametrize(("case", "training"), named.values(), ids=named)


@variants(CASES)
def test_a_small_network_trains(case, training):
    model, batch = case.make().train(training), case.batch()
    assert_trains(model, lambda: case.loss(model, batch), case.steps)


@pytest.mark.slow
@variants(WIDER)
def test_a_wider_network_trains(case, training):
    model, batch = case.make().train(training), case.batch()
    assert_trains(model, lambda: case.loss(model, batch), STEPS)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["GPT-2, tied", "GPT-2, untied"])
def test_five_steps_on_gpt2_with_padding(name, training):
    model, batch = WIDER[name].make().train(training), padded(tokens(4))
    assert_steps(model, lambda: model(**batch).loss)


def test_running_statistics_are_as_after_one_forward_pass_per_step():
    torch.manual_seed(0)
    model, batch = resnet().train(), pictures(8, 32)
    assert_steps(model, lambda: classify(model, batch))
    counts = {int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert len(counts) == 1
    assert counts <= {5, 6}  # a rejected step calls the closure again


def assert_steps(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, events = train(model, loss, 5)
    assert losses[-1] < losses[0]
    assert events <= {"rejected"}
    assert_moved(model, before)


def test_inside_and_outside_the_loss_is_the_same():
    """Labels that are ignored, a shift as the model does it, a reshape: the same steps."""
    batch = padded(tokens(4))
    labels = batch.pop("labels")
    following = functional.pad(labels, (0, 1), value=PADDING)[:, 1:].reshape(-1)
    runs = []
    for inside in (True, False):
        torch.manual_seed(1)
        model = gpt2(tied=True).eval()

        def loss(model=model, inside=inside):
            if inside:
                return model(**batch, labels=labels).loss
            logits = model(**batch).logits.reshape(-1, VOCABULARY)
            return functional.cross_entropy(logits, following)

        runs.append(train(model, loss, 4)[0])
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)

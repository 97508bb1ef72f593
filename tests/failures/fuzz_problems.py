"""Random problems for hypothesis: any small network, loss, data and settings that K-FAC takes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import kronfac
from kronfac import KFAC
from tests.conftest import seeded
from tests.layers.architectures import Architecture, architectures

SCALES = tuple(10.0**n for n in range(-30, 31, 5))
SPOILS = ("nothing", "nan", "inf", "duplicates", "constant", "zeros", "low rank", "nan target")
WAYS = ("own", "own in chunks", "closure", "loop", "loop of two")
"""`KFAC.closure`, whole or in chunks; a closure of the user's; a loop, with one or two micro-batches."""


@dataclass(frozen=True)
class Perceptron:
    """Linear layers, which K-FAC goes through by hand if there is nothing else in between."""

    widths: tuple[int, ...]
    activation: str
    norm: bool
    dropout: bool
    bias: bool

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        modules: list[nn.Module] = []
        for n, (d_in, d_out) in enumerate(pairwise(self.widths)):
            if n:
                modules.append(
                    {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[self.activation]()
                )
            if n and self.norm:
                modules.append(nn.LayerNorm(d_in))
            if n and self.dropout:
                modules.append(nn.Dropout(0.3))
            modules.append(nn.Linear(d_in, d_out, bias=self.bias))
        return nn.Sequential(*modules)

    def inputs(self, examples: int, seed: int) -> Tensor:
        return torch.randn(examples, self.widths[0], generator=seeded(seed))

    def outputs(self, examples: int) -> tuple[int, ...]:
        return examples, self.widths[-1]


@dataclass(frozen=True)
class Loss:
    """A loss module, its targets, and what the model ends in."""

    make: Callable[[], nn.Module]
    targets: str = "numbers"
    end: Callable[[], nn.Module] | None = None


LOSSES: dict[str, Loss] = {
    "MSELoss": Loss(nn.MSELoss),
    "MSELoss, sum": Loss(lambda: nn.MSELoss(reduction="sum")),
    "HuberLoss": Loss(nn.HuberLoss),
    "SmoothL1Loss": Loss(lambda: nn.SmoothL1Loss(beta=0.1)),
    "Gaussian": Loss(kronfac.Gaussian),
    "BCEWithLogitsLoss": Loss(nn.BCEWithLogitsLoss, "fractions"),
    "BCEWithLogitsLoss, weighted": Loss(
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), "fractions"
    ),
    "BCELoss": Loss(nn.BCELoss, "fractions", nn.Sigmoid),
    "Bernoulli": Loss(kronfac.Bernoulli, "fractions"),
    "PoissonNLLLoss": Loss(nn.PoissonNLLLoss, "counts"),
    "CrossEntropyLoss": Loss(nn.CrossEntropyLoss, "classes"),
    "CrossEntropyLoss, sum": Loss(lambda: nn.CrossEntropyLoss(reduction="sum"), "classes"),
    "CrossEntropyLoss, smoothed": Loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "classes"),
    "CrossEntropyLoss, ignoring": Loss(nn.CrossEntropyLoss, "some classes"),
    "CrossEntropyLoss, soft": Loss(nn.CrossEntropyLoss, "probabilities"),
    "NLLLoss": Loss(nn.NLLLoss, "classes", lambda: nn.LogSoftmax(dim=-1)),
    "Categorical": Loss(kronfac.Categorical, "classes"),
}


class ClassesSecond(nn.Module):
    """Outputs (examples, classes, places), as torch's losses of classes want them."""

    def forward(self, z: Tensor) -> Tensor:
        return z.transpose(1, -1)


@dataclass(frozen=True)
class Problem:
    """A small network with data that may be anything."""

    network: Perceptron | Architecture
    loss: str
    double: bool
    autocast: bool
    """Whether the closure or the loop is in bfloat16; only of a network in float32."""
    examples: int
    scales: tuple[float, float, float]
    """Scales of inputs, targets and weights."""
    spoil: str
    at: int
    """The step whose mini-batch is spoiled."""
    way: str
    inverse: str
    fisher: str
    decay: float
    lr: float
    groups: bool
    """Whether the last parameter has a learning rate and a weight decay of its own."""
    settings: tuple[tuple[str, Any], ...]
    """Others of KFAC's."""
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def _classes(self) -> bool:
        return LOSSES[self.loss].targets in ("classes", "some classes", "probabilities")

    @property
    def _places(self) -> bool:
        """Whether there are several outputs per example, of classes."""
        return self._classes and len(self.network.outputs(self.examples)) > 2

    def model(self) -> nn.Module:
        model, end = self.network.build(self.seed), LOSSES[self.loss].end
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(self.scales[2])
        ends = [] if end is None else [end()]
        if self._places and self.way.startswith("own"):
            ends.append(ClassesSecond())
        if ends:
            front = model if isinstance(model, nn.Sequential) else [model]
            model = nn.Sequential(*front, *ends)
        return model.to(self.dtype)

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        made = 1000 * self.seed + step
        x, shape = self.network.inputs(self.examples, made), self.network.outputs(self.examples)
        y = torch.randn(shape, generator=seeded(made + 1)) * self.scales[1]
        if step == self.at:
            x, y = self._spoiled(x), y * float("nan") if self.spoil == "nan target" else y
        if x.is_floating_point():
            x = (x * self.scales[0]).to(self.dtype)
        return x, self._targets(y, made + 2)

    def _spoiled(self, x: Tensor) -> Tensor:
        if self.spoil in ("nan", "inf") and x.is_floating_point():
            x.view(-1)[0] = float(self.spoil)
        elif self.spoil == "duplicates":
            x[:] = x[:1].clone()
        elif self.spoil == "constant":
            x[:] = 1
        elif self.spoil == "zeros":
            x[:] = 0
        elif self.spoil == "low rank":
            x[:] = x[..., :1].clone()
        return x

    def _targets(self, y: Tensor, seed: int) -> Tensor:
        kind = LOSSES[self.loss].targets
        if kind in ("classes", "some classes"):
            y = y.argmax(dim=-1)
            if kind == "some classes":
                y[torch.rand(y.shape, generator=seeded(seed)) < 0.4] = -100
            return y
        if kind == "fractions":
            y = y.sigmoid()
        elif kind == "counts":
            y = y.abs().floor()
        elif kind == "probabilities":
            y = functional.softmax(y, dim=-1)
            if self._places and self.way.startswith("own"):
                y = y.transpose(1, -1)
        return y.to(self.dtype)

    def optimizer(self) -> KFAC:
        model = self.model()
        *most, last = model.parameters()
        groups = [{"params": most}, {"params": [last], "lr": 0.3, "weight_decay": 1e-2}]
        trains_both = most and all(p.requires_grad for p in (*most, last))
        return KFAC(
            model,
            LOSSES[self.loss].make().to(self.dtype),
            params=groups if self.groups and trains_both else None,
            inverse=self.inverse,
            fisher=self.fisher,
            weight_decay=self.decay,
            lr=self.lr,
            **dict(self.settings),
        )

    def value(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What a user's closure or loop computes."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast and not self.double):
            z = model(x)
            if self._places and not self.way.startswith("own"):
                z, y = z.flatten(0, 1), y.flatten(0, 1)
            value: Tensor = loss(z, y)
        return value


networks = st.one_of(
    st.builds(
        Perceptron,
        widths=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
        activation=st.sampled_from(["relu", "tanh", "gelu"]),
        norm=st.booleans(),
        dropout=st.booleans(),
        bias=st.booleans(),
    ),
    architectures(most=2, in_training=True),
    architectures(most=2, in_training=True),
)
others = st.sampled_from(
    [
        (),
        (),
        (),
        (("intervals", kronfac.Intervals(inverse_interval=1)),),
        (("intervals", kronfac.Intervals(0.5, 0.5)),),
        (("damping", kronfac.AdaptiveDamping(reject=None)),),
        (("step_rule", kronfac.QuadraticModel(radius=0.1)),),
        tuple(kronfac.presets.paper().items()),
        (("step_rule", kronfac.RawStep(0.1)),),
        (("step_rule", kronfac.ConjugateGradients(cg_steps=2)),),
        (("blocks", kronfac.Blocks(dense_limit=0)),),
        (("blocks", kronfac.Blocks(sharing="reduce", wide_limit=2)),),
    ]
)
problems = st.builds(
    Problem,
    network=networks,
    loss=st.sampled_from(sorted(LOSSES)),
    double=st.booleans(),
    autocast=st.sampled_from([False, False, False, True]),
    examples=st.sampled_from([1, 2, 3, 7]),
    scales=st.tuples(
        *([st.one_of(st.just(1.0), st.sampled_from(SCALES))] * 2),
        st.sampled_from([1.0, 1.0, 1.0, 1.0, 1e-30, 1e-10, 1e5, 1e15, 1e30]),
    ),
    spoil=st.sampled_from(SPOILS),
    at=st.integers(0, 3),
    way=st.sampled_from(WAYS),
    inverse=st.sampled_from(["block_diagonal", "block_tridiagonal", "ekfac"]),
    fisher=st.sampled_from(["sampled", "sampled", "empirical", "exact"]),
    decay=st.sampled_from([0.0, 1e-3]),
    lr=st.sampled_from([1.0, 1.0, 1.0, 0.5, 20.0]),
    groups=st.booleans(),
    settings=others,
    seed=st.integers(0, 1_000_000),
)

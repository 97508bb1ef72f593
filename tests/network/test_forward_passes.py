"""Forward passes as people write them: vᵀFv of what was recorded equals the dense definition.

The truth is F = Σ_t s Jₜᵀ F_R Jₜ in float64, with J from autograd, one output at a time, of the same
outputs computed by code of the test's own.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from kronfac import KFAC
from kronfac.linearize import fisher_gram, fisher_product
from kronfac.linearize.base import by_differences, by_forward_mode
from kronfac.record import record
from tests.conftest import mlp, network_of, normal, seeded

N, C = 6, 3
X, OTHER = normal(N, 4), normal(N, 4, seed=1)
Y = torch.randint(C, (N,), generator=seeded(2))
T = 5
SEQUENCES = normal(N, T, 4)
LABELS = torch.randint(C, (N, T), generator=seeded(3))

Truth = list[tuple[Callable[..., Tensor], float, Tensor]]
"""Every loss: F.mse_loss or F.cross_entropy with a mean, what it counts, its outputs (terms, event)."""


def quadratic_form(truth: Truth, parameters: list[nn.Parameter], v: list[Tensor]) -> float:
    """vᵀFv by the definition."""
    total = 0.0
    for loss, factor, outputs in truth:
        z, Jv = outputs.detach(), torch.empty_like(outputs.detach())
        for index in torch.cartesian_prod(*map(torch.arange, z.shape)).reshape(-1, z.dim()):
            place = tuple(index.tolist())
            rows = torch.autograd.grad(
                outputs[place],
                parameters,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            Jv[place] = sum(float((row * t).sum()) for row, t in zip(rows, v, strict=True))
        if loss is F.mse_loss:
            total += factor * float(2 * Jv.square().sum()) / z.numel()
        else:
            p = z.softmax(dim=1)
            products = p * Jv - p * (p * Jv).sum(dim=1, keepdim=True)
            total += factor * float((Jv * products).sum()) / len(z)
    return total


@dataclass(frozen=True)
class Case:
    """What a closure does with a model, and what that is."""

    model: Callable[[], nn.Module]
    closure: Callable[[nn.Module], Tensor | None]
    """Returns the loss, or has called backward itself."""
    truth: Callable[[nn.Module], Truth]
    uses_seen: bool = True
    """Whether K-FAC sees how all parameters are used; else it warns of that."""


def ce(z: Tensor, factor: float = 1.0) -> tuple[Callable[..., Tensor], float, Tensor]:
    return (F.cross_entropy, factor, z)


def mse(z: Tensor, factor: float = 1.0) -> tuple[Callable[..., Tensor], float, Tensor]:
    return (F.mse_loss, factor, z)


def classify(call: Callable[[nn.Module], Tensor]) -> dict[str, Callable]:
    """A closure and its truth: the classes of N examples from what `call` returns."""
    return {
        "closure": lambda model: F.cross_entropy(call(model), Y),
        "truth": lambda model: [ce(call(model))],
    }


def label(call: Callable[[nn.Module], Tensor]) -> dict[str, Callable]:
    """The same for the labels of all places, flattened."""
    return {
        "closure": lambda model: F.cross_entropy(call(model).reshape(-1, C), LABELS.reshape(-1)),
        "truth": lambda model: [ce(call(model).reshape(-1, C))],
    }


# -------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.0)
        self.out, self.need_weights = nn.Linear(4, C), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attention(x, x, x, need_weights=self.need_weights)[0])


class Fused(nn.Module):
    """Attention by torch's function, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(len(x), T, 3, 2, 2).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).reshape(len(x), T, 4))


class Encoder(nn.Module):
    """torch's own encoder, with two layers."""

    def __init__(
        self, dropout: float = 0.0, padded: bool = False, batch_first: bool = True
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out, self.padded = nn.Linear(4, C), padded

    def forward(self, x: Tensor) -> Tensor:
        mask = None
        if self.padded:
            mask = torch.arange(T) >= torch.tensor([5, 3, 4, 5, 2, 1])[: len(x), None]
        return self.out(self.encoder(x, src_key_padding_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **kwargs: object) -> None:
        super().__init__()
        self.rnn = kind(4, 3, **kwargs)
        self.out = nn.LazyLinear(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def recurrent(kind: type[nn.RNNBase] = nn.LSTM, **kwargs: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Recurrent(kind, **kwargs).double()
        model(SEQUENCES)
        return model

    return make


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = mlp([4, 5])
        self.middle = nn.Sequential(nn.Tanh(), *mlp([5, 5]), nn.Dropout(0.3))
        self.last, self.reentrant = mlp([5, C]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        return self.last(h)


class Autoencoder(nn.Module):
    """Parts that closures call, a parameter of its own, a method."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp([4, 5]), mlp([5, C], seed=1)
        self.scale = nn.Parameter(normal(5, seed=2))
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)) * self.scale)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y) if x.dim() > 2 else F.cross_entropy(self.forward(x), y)


def parts(model: nn.Module) -> Tensor:
    return model.decoder(torch.tanh(model.encoder(X)) * model.scale)


def with_dropout_and_norm(model: nn.Module) -> Tensor:
    return model.decoder(model.drop(model.norm(model.encoder(X)) * model.scale))


@dataclass
class Bag:
    """A batch as a library has it."""

    x: Tensor
    graph: Tensor


@dataclass
class Output:
    hidden: dict[str, Tensor]
    logits: Tensor


class Opaque:
    """Neither a container nor a dataclass."""

    def __init__(self, **values: Tensor) -> None:
        self._store = values

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["_store"][name]


GRAPHS = torch.tensor([0, 0, 1, 2, 2, 2])
SIZES = [3, 1, 4, 2, 5, 1]


class Flexible(nn.Module):
    """Takes and returns whatever it is asked to."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.net, self.returns = mlp([4, 5, C]), returns

    def forward(self, x=None, *, extra=None, bag=None, graphs=None):
        if graphs is not None:
            z = self.net(torch.stack([nodes.mean(dim=0) for nodes in graphs]))
        elif bag is not None:
            h = self.net(bag.x)
            z = torch.zeros(3, C, dtype=h.dtype).index_add(0, bag.graph, h)
        else:
            x = x["x"] if isinstance(x, dict) else x
            z = self.net(x if extra is None else x * extra)
        if self.returns == "tuple":
            return z.detach(), (z, {"more": [z + 1]})
        if self.returns == "dataclass":
            return Output({"h": z * 2}, z)
        return z


def graphs() -> list[Tensor]:
    return [normal(size, 4, seed=n) for n, size in enumerate(SIZES)]


# ------------------------------------------------------------------------------------------ closures


def two_backwards(model: nn.Module) -> None:
    z = model(X)
    F.cross_entropy(z, Y).backward(retain_graph=True)
    (2 * F.mse_loss(z, OTHER[:, :C])).backward()


def one_after_the_other(model: nn.Module) -> None:
    a, b = model(X), model(OTHER)
    F.cross_entropy(a, Y).backward()
    F.cross_entropy(b, Y).backward()


def checkpointed_parts(reentrant: bool) -> Callable[[nn.Module], Tensor]:
    def call(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        h = checkpoint(model.encoder, x, use_reentrant=reentrant)
        return model.decoder(torch.tanh(h) * model.scale)

    return call


def similarities(model: nn.Module) -> Tensor:
    a, b = F.normalize(model(X), dim=1), F.normalize(model(OTHER), dim=1)
    return a @ b.mT / 0.5


def plain(**kwargs: object) -> Callable[[], nn.Module]:
    return lambda: Flexible(**kwargs)


def evaluated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


def frozen_encoder() -> nn.Module:
    model = Autoencoder()
    model.encoder.requires_grad_(False)
    model.norm.requires_grad_(False)
    return model.eval()


def trains_all(make: Callable[[], nn.Module], *unused: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        for name in unused:
            model.get_submodule(name).requires_grad_(False)
        return model

    return build


PARTS = trains_all(Autoencoder, "norm")
CASES = {
    "attention": Case(Attention, **label(lambda m: m(SEQUENCES))),
    "attention with weights": Case(
        lambda: Attention(need_weights=True), **label(lambda m: m(SEQUENCES))
    ),
    "attention in eval": Case(evaluated(Attention), **label(lambda m: m(SEQUENCES))),
    "fused attention": Case(Fused, **label(lambda m: m(SEQUENCES))),
    "encoder": Case(lambda: Encoder(0.1), **label(lambda m: m(SEQUENCES))),
    "encoder in eval": Case(evaluated(Encoder), **label(lambda m: m(SEQUENCES))),
    "padded encoder": Case(lambda: Encoder(padded=True), **label(lambda m: m(SEQUENCES))),
    "padded encoder in eval": Case(
        evaluated(lambda: Encoder(padded=True)), **label(lambda m: m(SEQUENCES))
    ),
    "encoder, time first": Case(
        lambda: Encoder(batch_first=False), **label(lambda m: m(SEQUENCES))
    ),
    "LSTM": Case(recurrent(), **label(lambda m: m(SEQUENCES))),
    "LSTM, layers": Case(
        recurrent(num_layers=2, bidirectional=True, dropout=0.3, batch_first=True),
        **label(lambda m: m(SEQUENCES)),
    ),
    "GRU": Case(recurrent(nn.GRU, batch_first=True), **label(lambda m: m(SEQUENCES))),
    "checkpoint": Case(lambda: Checkpointed(False), **classify(lambda m: m(X))),
    "reentrant checkpoint": Case(
        lambda: Checkpointed(True),
        lambda m: F.cross_entropy(m(X), Y),
        lambda m: [ce(m.last(m.middle(m.first(X))))],
    ),
    "checkpointed part": Case(PARTS, **classify(checkpointed_parts(False))),
    "reentrant checkpoint of a part": Case(
        PARTS,
        lambda m: F.cross_entropy(checkpointed_parts(True)(m), Y),
        lambda m: [ce(parts(m))],
    ),
    "two backward passes": Case(plain(), two_backwards, lambda m: [ce(m(X)), mse(m(X), 2.0)]),
    "one loss after the other": Case(
        plain(), one_after_the_other, lambda m: [ce(m(X)), ce(m(OTHER))]
    ),
    "dict": Case(plain(), **classify(lambda m: m({"x": X, "name": "n"}))),
    "keywords": Case(plain(), **classify(lambda m: m(x=X, extra=OTHER))),
    "graphs": Case(plain(), **classify(lambda m: m(graphs=graphs()))),
    "dataclass": Case(
        plain(),
        lambda m: F.cross_entropy(m(bag=Bag(X, GRAPHS)), Y[:3]),
        lambda m: [ce(m(bag=Bag(X, GRAPHS)))],
    ),
    "object": Case(
        plain(),
        lambda m: F.cross_entropy(m(bag=Opaque(x=X, graph=GRAPHS)), Y[:3]),
        lambda m: [ce(m(bag=Opaque(x=X, graph=GRAPHS)))],
    ),
    "returns a tuple": Case(plain(returns="tuple"), **classify(lambda m: m(X)[1][1]["more"][0])),
    "returns a dataclass": Case(plain(returns="dataclass"), **classify(lambda m: m(X).hidden["h"])),
    "siamese": Case(
        plain(), lambda m: F.mse_loss(m(X), m(OTHER)), lambda m: [mse(m(X) - m(OTHER))]
    ),
    "siamese, by keywords": Case(
        plain(),
        lambda m: F.mse_loss(target=m(X), input=m(OTHER), reduction="mean"),
        lambda m: [mse(m(X) - m(OTHER))],
    ),
    "siamese with a fixed side": Case(
        plain(), lambda m: F.mse_loss(m(X), m(OTHER).detach()), lambda m: [mse(m(X))]
    ),
    "contrastive": Case(
        plain(),
        lambda m: F.cross_entropy(similarities(m), torch.arange(N)),
        lambda m: [ce(similarities(m))],
    ),
    "two parts concatenated": Case(plain(), **classify(lambda m: torch.cat([m(X[:2]), m(X[2:])]))),
    "model of its own outputs": Case(
        lambda: mlp([4, 4]),
        lambda m: F.mse_loss(m(torch.tanh(m(X))), OTHER),
        lambda m: [mse(m(torch.tanh(m(X))))],
    ),
    "parts of the model": Case(PARTS, **classify(parts)),
    "parts with dropout and batch normalisation": Case(
        Autoencoder, **classify(with_dropout_and_norm)
    ),
    "forward": Case(PARTS, **classify(lambda m: m.forward(X))),
    "method": Case(PARTS, lambda m: m.loss(X, Y), lambda m: [ce(parts(m))]),
    "frozen part": Case(frozen_encoder, **classify(parts)),
    "weights alone": Case(
        lambda: nn.Linear(4, C),
        **classify(lambda m: F.linear(X, m.weight, m.bias)),
        uses_seen=False,
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


def recorded(case: Case, model: nn.Module):
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective) as recording:
        loss = case.closure(model)
        if loss is not None:
            loss.backward()
    for p in model.parameters():
        p.grad = None
    return network, recording.batch()


def directions(network, count: int = 1):
    return [
        tuple(normal(*unit.shape, seed=7 * k + n) for n, unit in enumerate(network.units))
        for k in range(count)
    ]


@each_case
def test_the_fisher_of_what_was_recorded_is_the_dense_one(name):
    if name == "checkpoint" and hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):
        pytest.skip("checkpoints of torch 2.7 have no forward mode: J v is by finite differences")
    case = CASES[name]
    model = case.model().double()
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    network, batch = recorded(case, model)
    (v,) = directions(network)
    before, versions = torch.get_rng_state(), [p._version for p in model.parameters()]
    gram = fisher_gram(network, batch, [v])
    assert torch.equal(torch.get_rng_state(), before)
    assert [p._version for p in model.parameters()] == versions
    torch.manual_seed(1)
    own = dict(other.named_parameters())
    names = [name for unit in network.units for name in unit.names]
    expected = quadratic_form(case.truth(other), [own[n] for n in names], network.split(v))
    assert float(gram) == pytest.approx(expected, rel=1e-8)
    assert expected > 0


@each_case
def test_a_step_of_it_warns_of_nothing_and_leaves_one_forward_pass_behind(name):
    """Warnings are errors; buffers and random numbers are those of the closure's own pass."""
    case = CASES[name]
    if not case.uses_seen:
        pytest.skip("warns of a weight that is used outside of its module")
    model = case.model().double()
    other = copy.deepcopy(model)
    optimizer = KFAC(model, nn.CrossEntropyLoss())

    def closure() -> float:
        optimizer.zero_grad()
        loss = case.closure(model)
        if loss is not None:
            loss.backward()
            return loss
        with torch.no_grad():
            return float(sum(f * _loss(kind, z) for kind, f, z in case.truth(model)))

    torch.manual_seed(1)
    optimizer.step(closure)
    assert not optimizer.report.events
    after = torch.get_rng_state()
    torch.manual_seed(1)
    case.closure(other)
    assert torch.equal(torch.get_rng_state(), after)
    for (key, buffer), (_, expected) in zip(
        model.named_buffers(), other.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), key


def _loss(kind: Callable[..., Tensor], z: Tensor) -> Tensor:
    return kind(z, Y if kind is F.cross_entropy and len(z) == N else OTHER[:, :C])


# ------------------------------------------------------------------------------------- single precision


def in_single_precision(model: nn.Module, closure: Callable[[nn.Module], Tensor]):
    model = model.float()
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective) as recording:
        closure(model).backward()
    return network, recording.batch()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, C)
    )


IMAGES = normal(N, 1, 8, 8)
SINGLE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "encoder": (Encoder, SEQUENCES),
    "encoder in eval": (evaluated(Encoder), SEQUENCES),
    "LSTM": (recurrent(), SEQUENCES),
    "LSTM, layers": (recurrent(num_layers=2, bidirectional=True, batch_first=True), SEQUENCES),
    "GRU": (recurrent(nn.GRU), SEQUENCES),
    "convolution": (convolutional, IMAGES),
}


FUSED = {"encoder", "encoder in eval", "LSTM", "LSTM, layers"}


@pytest.mark.parametrize("name", SINGLE)
def test_engines_in_single_precision(name):
    """Forward mode to 1e-4, unless torch has fused kernels; differences to 1e-2, most to 1e-3."""
    make, x = SINGLE[name]
    model = make().double()
    y = LABELS.reshape(-1) if x is SEQUENCES else Y
    truth = [ce(model(x).reshape(-1, C))]
    errors = {}
    for engine in (by_forward_mode, by_differences):
        errors[engine] = []
        for seed in range(3):
            network, batch = in_single_precision(
                copy.deepcopy(model), lambda m: F.cross_entropy(m(x.float()).reshape(-1, C), y)
            )
            v = tuple(normal(*u.shape, seed=7 * seed + n) for n, u in enumerate(network.units))
            own = dict(model.named_parameters())
            names = [name for unit in network.units for name in unit.names]
            expected = quadratic_form(truth, [own[n] for n in names], network.split(v))
            network.learned.compared = True
            network.learned.forward_mode = engine is by_forward_mode
            gram = fisher_gram(network, batch, [tuple(V.float() for V in v)])
            # Torch's kernels for attention and for LSTMs have no forward mode in single precision.
            assert network.learned.forward_mode is (engine is by_forward_mode and name not in FUSED)
            errors[engine].append(abs(float(gram) / expected - 1))
    assert max(errors[by_forward_mode]) < (1e-2 if name in FUSED else 1e-4)
    assert max(errors[by_differences]) < 1e-2
    assert sorted(errors[by_differences])[1] < 1e-3


# --------------------------------------------------------------------------------- what is left alone


def test_differences_leave_graphs_valid():
    """F v takes J v and then Jᵀ of one graph: what is written in between is put back, unseen."""
    network, batch = recorded(CASES["encoder"], Encoder().double())
    (v,) = directions(network)
    found = []
    for forward in (True, False):
        network.learned.forward_mode, network.learned.compared = forward, True
        found.append(fisher_product(network, batch, v))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)


def test_other_threads_have_checkpoints_and_kernels_as_they_are():
    """While this thread runs a pass of K-FAC's own, and after it."""
    original, seen = checkpoints.CheckpointFunction, []
    model = Checkpointed(True).double()
    network, batch = recorded(CASES["reentrant checkpoint"], model)
    x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)

    class Watch(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return h

    def elsewhere() -> None:
        z = checkpoint(torch.tanh, x, use_reentrant=True)
        seen.append(type(z.grad_fn).__name__)
        seen.append(torch.backends.mha.get_fastpath_enabled())

    model.middle.append(Watch())
    batch.passes[0].run(model)
    assert seen == ["CheckpointFunctionBackward", True]
    assert checkpoints.CheckpointFunction is original
    with pytest.raises(RuntimeError, match="broken"), record(model, network.objective):
        raise RuntimeError("broken")
    assert checkpoints.CheckpointFunction is original

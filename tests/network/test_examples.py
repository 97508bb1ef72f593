"""Examples are along the first dimension; what does not keep to that is used whole, or summed."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from kronfac import KFAC
from kronfac.curvature.taps import gradients_of_examples
from kronfac.linearize import Traced, fisher_gram
from kronfac.model import Network
from kronfac.record import Batch, record, subsets
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples, select
from tests.conftest import AUTODIFF, mlp, network_of, normal, seeded

N, C = 4, 3


def recorded(model: nn.Module, z, y) -> tuple[Network, Batch]:
    """A network and the mini-batch of one loss; z computes the outputs."""
    model.double()
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective) as recording:
        F.cross_entropy(z(model), y).backward()
    return network, check_examples(network, recording.batch())


def labels(*shape: int) -> Tensor:
    return torch.randint(C, shape, generator=seeded(1))


def flattened(x: Tensor):
    return lambda model: model(x).reshape(-1, C)


# ---------------------------------------------------------------------- which passes are taken apart


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.out = kind(4, 5, batch_first=batch_first), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def encoder(batch_first: bool = True, dropout: float = 0.1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=batch_first)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, C)
    )


class Transposed(nn.Module):
    """A network with time first that is called with examples first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


APART = {
    "LSTM": Recurrent,
    "GRU": lambda: Recurrent(nn.GRU),
    "encoder": encoder,
    "layers with time first": lambda: Transposed(encoder(False)),
    "LSTM with time first": lambda: Transposed(Recurrent(batch_first=False)),
}


@pytest.mark.parametrize("length", [5, 6, 7])  # as many steps as examples, fewer, more
@pytest.mark.parametrize("name", APART)
def test_some_examples_have_the_outputs_and_targets_that_they_had_among_all(name, length):
    """In train(): dropout inside of attention does not hide that examples are independent."""
    x, y = normal(6, length, 4), labels(6 * length)
    network, batch = recorded(APART[name](), flattened(x), y)
    (part,) = batch.passes
    assert part.apart
    index = torch.tensor([1, 4])
    some = select(part, index)
    network.model.eval()
    assert_close(some.run(network.model)[0], flattened(x[index])(network.model), **AUTODIFF)
    assert torch.equal(some.terms[0].targets, y.view(6, -1)[index].flatten())


def test_dropout_between_the_layers_of_an_lstm_hides_nothing():
    lstm = Recurrent()
    lstm.rnn = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)
    _, batch = recorded(lstm, flattened(normal(6, 5, 4)), labels(30))
    assert batch.passes[0].random
    assert batch.passes[0].apart


@pytest.mark.parametrize("examples", [2, 3])
def test_two_or_three_examples_are_taken_apart_too(examples):
    x = normal(examples, 4)
    assert recorded(mlp([4, C]), lambda m: m(x), labels(examples))[1].passes[0].apart
    mixing = Gated(1.0)
    assert not recorded(mixing, lambda m: m(x), labels(examples))[1].passes[0].apart


def test_sequences_of_other_lengths_need_no_check_of_their_own():
    model = Recurrent()
    network, _ = recorded(model, flattened(normal(6, 5, 4)), labels(30))
    for length in (8, 9, 11):
        with record(model, network.objective) as recording:
            F.cross_entropy(flattened(normal(6, length, 4))(model), labels(6 * length)).backward()
        check_examples(network, recording.batch())
    assert [dims.apart for dims in network.learned.dims.values()] == [True]


def test_constants_of_the_closure_are_divided_too():
    x, scale = normal(6, 4), normal(6, 1, seed=1)
    _, batch = recorded(mlp([4, C]), lambda m: m(x) * scale, labels(6))
    assert batch.passes[0].apart


def test_a_mean_over_subsets_is_the_fisher_of_all():
    network, batch = recorded(Recurrent(), flattened(normal(6, 5, 4)), labels(30))
    v = tuple(normal(*unit.shape, seed=n) for n, unit in enumerate(network.units))
    (part,) = batch.passes
    with torch.no_grad():
        whole = fisher_gram(network, batch, [v])
        alone = [Batch((select(part, torch.tensor([n])),)) for n in range(6)]
        parts = [fisher_gram(network, one, [v]) for one in alone]
    assert_close(sum(parts), whole, rtol=1e-10, atol=1e-12)


class Trimmed(nn.Module):
    """Returns as many steps as the longest sequence has, zeros behind the end of others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, C)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return self.linear(x[:, : mask.shape[1]]) * mask[:, :, None]


def similarities(model: nn.Module) -> Tensor:
    z = model(normal(6, 4))
    return z @ z.mT


def among_others(model: nn.Module) -> Tensor:
    return model(normal(6, 4)) @ model(normal(6, 4, seed=1)).mT


WHOLE = {
    "similarities among themselves": (lambda: mlp([4, 5, 6]), similarities, 6),
    "similarities with others": (lambda: mlp([4, 5, 6]), among_others, 6),
    "normalised over examples": (
        lambda: mlp([4, C]),
        lambda m: m(normal(6, 4)).log_softmax(dim=0),
        6,
    ),
    "shuffled": (
        lambda: mlp([4, C]),
        lambda m: m(normal(6, 4))[torch.tensor([1, 0, 2, 5, 4, 3])],
        6,
    ),
    "fewer outputs": (lambda: mlp([4, C]), lambda m: m(normal(6, 4))[:4], 4),
    "two calls, one after the other": (
        lambda: mlp([4, C]),
        lambda m: torch.cat([m(normal(6, 4)), m(normal(6, 4, seed=1))]),
        12,
    ),
    "sequences trimmed to the longest": (
        Trimmed,
        lambda m: m(normal(6, 5, 4), torch.tensor([4, 4, 2, 3, 4, 1])).reshape(-1, C),
        24,
    ),
    "LSTM, time first": (lambda: Recurrent(batch_first=False), flattened(normal(5, 6, 4)), 30),
    "last step, time first": (
        lambda: Recurrent(batch_first=False),
        lambda m: m(normal(6, 6, 4))[-1],
        6,
    ),
    "encoder, time first": (lambda: encoder(False), flattened(normal(6, 6, 4)), 36),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_does_not_keep_to_the_convention_is_used_whole(name):
    make, outputs, terms = WHOLE[name]
    network, batch = recorded(make(), outputs, labels(terms))
    assert not batch.passes[0].apart
    (some,) = subsets(network, batch, [1], seeded())
    assert some.passes == batch.passes


# ----------------------------------------------------------------------------- the check, and its traces


class Gated(nn.Module):
    """Mixes its examples through a gate that is zero in the beginning, as in ReZero."""

    def __init__(self, gate: float = 0.0) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, C), nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.gate * x.mean(dim=0))


def test_it_is_checked_once_more_after_a_zero_has_moved():
    model = Gated()
    network, batch = recorded(model, lambda m: m(normal(6, 4)), labels(6))
    assert batch.passes[0].apart
    with torch.no_grad():
        model.linear.weight.add_(0.1)
    assert check_examples(network, batch).passes[0].apart  # the zero has not moved yet
    with torch.no_grad():
        model.gate.fill_(0.1)
    assert not check_examples(network, batch).passes[0].apart


def test_it_is_checked_no_third_time(monkeypatch):
    model = mlp([4, 5, C])
    with torch.no_grad():
        model[0].bias.zero_()
    runs = 0
    forward = model.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return forward(x)

    model.forward = counted
    network, batch = recorded(model, lambda m: m(normal(6, 4)), labels(6))
    assert runs == 3  # the closure's own pass, and two
    for value, expected in ((0.0, 3), (0.1, 5), (0.0, 5), (0.2, 5)):
        with torch.no_grad():
            model[0].bias.fill_(value)
        check_examples(network, batch)
        assert runs == expected


class Averaged(nn.Module):
    """BatchNorm, dropout, a counter, and a mean over the examples of its own if asked for."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, C))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.body(F.dropout(x, 0.1, self.training))
        return z - z.mean(dim=0) if self.mixes else z


def test_the_check_leaves_no_trace():
    model = Averaged().double()
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective, network.buffers) as recording:
        F.cross_entropy(model(normal(200, 4)), labels(200)).backward()
    batch = recording.batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    random = torch.get_rng_state()
    assert check_examples(network, batch).passes[0].apart
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [p._version for p in model.parameters()] == versions
    assert all(m.training for m in model.modules())


def test_a_resumed_run_goes_by_the_check_of_the_run_before():
    def run(optimizer: KFAC, model: nn.Module) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(normal(6, 4)), labels(6))
            loss.backward()
            return loss

        optimizer.step(closure)

    model = Transposed(encoder(False)).double()
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), model, nn.Flatten())
    model = model.double()
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    run(optimizer, model)
    saved = optimizer.state_dict()
    again = KFAC(model, nn.CrossEntropyLoss())
    again.load_state_dict(saved)
    (expected,) = optimizer.network.learned.dims.values()
    assert expected.second
    assert list(again.network.learned.dims.values()) == [expected]


# ------------------------------------------------------------------------------------------ BatchNorm


def test_some_examples_under_batch_norm_are_a_mini_batch_of_their_own():
    x = normal(200, 4)
    network, batch = recorded(Averaged().eval(), lambda m: m(x), labels(200))
    network.model.train()
    S1, S2 = subsets(network, batch, [20, 100], seeded())
    assert (S1.examples, S2.examples) == (64, 100)  # no fewer to take statistics from
    assert all(m.training for m in network.model.modules())
    (call,) = S2.passes[0].calls
    rows = {tuple(row.tolist()) for row in call.args[0]}
    assert len(rows) == 100
    assert rows <= {tuple(row.tolist()) for row in x}


def test_batch_norm_hides_no_other_dependence_between_examples():
    network, batch = recorded(Averaged(mixes=True), lambda m: m(normal(200, 4)), labels(200))
    (some,) = subsets(network, batch, [100], seeded())
    assert some.passes == batch.passes


def test_micro_batches_under_batch_norm_are_used_whole():
    """A few examples of each would be normalised by hardly any."""
    network, batch = recorded(Averaged(), lambda m: m(normal(80, 4)), labels(80))
    batch = Batch(batch.passes * 3)
    (some,) = subsets(network, batch, [90], seeded())
    assert [part.examples for part in some.passes] == [80, 80]


# ----------------------------------------------- gradients of single examples, by autograd on each alone


def assert_gradients_of_examples(model: nn.Module, *given: Tensor) -> set[str]:
    """Those that taps show are those of passes over one example each, or their sum; which, by unit."""
    model = model.double()
    network = network_of(model)
    with record(model, network.objective) as recording:
        z = model(*given)
        F.mse_loss(z, torch.zeros_like(z)).backward()
    (part,) = check_examples(network, recording.batch()).passes
    network = discover(network, part)
    view = Traced(network, part)
    (outputs,) = view.outputs
    r, summed = normal(*outputs.shape, seed=9), set()
    for unit, taps in zip(network.units, view.taps([r]), strict=True):
        found = torch.cat(list(gradients_of_examples(taps)))
        expected = []
        for n in range(N):
            z = model(*(x[n : n + 1] for x in given))
            one = r.reshape(N, *z.shape[1:])[n : n + 1]
            expected.append(unit.join(torch.autograd.grad(z, unit.parameters, one)))
        if len(found) == 1:
            summed.add(unit.name)
            expected = [torch.stack(expected).sum(dim=0)]
        assert_close(found, torch.stack(expected), **AUTODIFF, msg=f"{unit.names}")
    assert view.summed == bool(summed)
    return summed


class Pairs(nn.Module):
    """Two views of every example through one trunk, in one call of it."""

    def __init__(self, trunk: nn.Module, how: str) -> None:
        super().__init__()
        self.trunk, self.how = trunk, how

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.trunk(JOINS[self.how](a, b)).flatten(1).chunk(2)
        return za * zb + za


JOINS = {
    "cat": lambda a, b: torch.cat([a, b]),
    "stacked and flattened": lambda a, b: torch.stack([a, b]).flatten(0, 1),
    "repeated": lambda a, b: a.repeat(2, *[1] * (a.dim() - 1)) + torch.cat((b, 2 * b)),
}
TRUNKS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (3,)),
    "sequences of N": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (N, 3)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.PReLU()), (2, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Conv1d(4, 4, 2, groups=2)),
        (2, 5),
    ),
    "transposed convolutions": (
        lambda: nn.Sequential(
            nn.ConvTranspose1d(2, 4, 3, stride=2), nn.ConvTranspose1d(4, 2, 2, groups=2, bias=False)
        ),
        (2, 4),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), (3, 4)),
}


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize("name", TRUNKS)
def test_two_views_of_every_example_are_summed(name, how):
    build, shape = TRUNKS[name]
    a, b = normal(N, *shape), normal(N, *shape, seed=1)
    assert assert_gradients_of_examples(Pairs(build(), how), a, b)


def test_views_of_what_is_looked_up_are_summed():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(6, 3), nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            za, zb = self.out(self.table(torch.cat([a, b]))).chunk(2)
            return za * zb

    a, b = (torch.randint(6, (N,), generator=seeded(n)) for n in range(2))
    assert assert_gradients_of_examples(Lookup(), a, b) == {"table", "out"}


class Frames(nn.Module):
    """The frames of every example as inputs of their own, and then their mean."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.scale * x.flatten(0, 1)))
        return h.unflatten(0, x.shape[:2]).mean(dim=1).flatten(1)


@pytest.mark.parametrize("frames", [2, N])
@pytest.mark.parametrize("name", TRUNKS)
def test_frames_are_places_of_their_example(name, frames):
    build, shape = TRUNKS[name]
    model = Frames(build())
    model.scale = nn.Parameter(normal(shape[-1]))
    assert not assert_gradients_of_examples(model, normal(N, frames, *shape))


class Sequences(nn.Module):
    """A network in which every place depends on those before it, with time first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 3), nn.LayerNorm(3)
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale, self.slope = nn.Parameter(normal(4)), nn.PReLU()

    def forward(self, words: Tensor) -> Tensor:
        h = self.norm(self.table(words.mT)).cumsum(dim=0)
        return self.out(self.slope(self.inner(h)) * self.scale).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("length", [3, N, 2 * N])
def test_layers_that_are_called_with_time_first_have_examples_along_the_second_dimension(length):
    words = torch.randint(6, (N, length), generator=seeded())
    assert not assert_gradients_of_examples(Sequences(), words)


class Positions(nn.Module):
    """As many positions as examples, or twice as many, looked up once for all examples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("numbers", torch.arange(16).view(1, -1))
        self.table, self.mix, self.out = nn.Embedding(16, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = LOOKUPS[self.how](self, x)
        return self.out(torch.tanh(x + self.mix(self.table(places)))).flatten(1)


LOOKUPS = {
    "arange": lambda model, x: torch.arange(x.shape[1]),
    "a row of them": lambda model, x: torch.arange(x.shape[1]).unsqueeze(0) + 1,
    "a buffer": lambda model, x: model.numbers[:, : x.shape[1]],
    "for every example": lambda model, x: torch.arange(x.shape[1]).expand(len(x), -1),
}


@pytest.mark.parametrize("length", [N, 2 * N, 3])
@pytest.mark.parametrize("how", LOOKUPS)
def test_a_table_of_positions_is_no_batch_of_examples(how, length):
    torch.manual_seed(0)
    summed = assert_gradients_of_examples(Positions(how), normal(N, length, 3))
    assert summed == (set() if how == "for every example" else {"table", "mix"})


def test_a_pass_that_is_used_whole_shows_sums():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x)) * x.sum()

    model, x = Mixed().double(), normal(N, 3)
    network = network_of(model)
    with record(model, network.objective) as recording:
        F.mse_loss(model(x), torch.zeros(N, 2, dtype=x.dtype)).backward()
    (part,) = check_examples(network, recording.batch()).passes
    view, r = Traced(network, part), normal(N, 2, seed=9)
    grads = torch.autograd.grad((model(x) * r).sum(), network.parameters)
    for taps, V in zip(view.taps([r]), network.join(grads), strict=True):
        assert_close(torch.cat(list(gradients_of_examples(taps))), V[None], **AUTODIFF)
    assert view.summed
    assert math.prod(view.outputs[0].shape) == 2 * N

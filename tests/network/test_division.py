"""How passes are divided: along the right dimension or not at all, whatever the layout."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kronfac import KFAC
from kronfac.fisher_products import fisher_gram
from kronfac.network import Batch, Network, record, subsets
from kronfac.network.division import DIVISIONS, arrange, select, slicing
from tests.conftest import mlp, network_of, normal, seeded

C = 3


def recorded(model: nn.Module, z, y) -> tuple[Network, Batch]:
    """A network and the mini-batch of one loss; z computes the outputs."""
    model.double()
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective) as recording:
        F.cross_entropy(z(model), y).backward()
    return network, arrange(network, recording.batch())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn, self.out = kind(4, 5, batch_first=batch_first), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def encoder(batch_first: bool = False, dropout: float = 0.1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=batch_first)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, C)
    )


def labels(*shape: int) -> Tensor:
    return torch.randint(C, shape, generator=seeded(1))


def flattened(x: Tensor):
    return lambda model: model(x).reshape(-1, C)


def last_step(x: Tensor):
    return lambda model: model(x)[-1]


def transposed(x: Tensor):
    return lambda model: model(x).permute(1, 2, 0)  # (N, C, T)


TIME_FIRST = {
    "LSTM": (Recurrent, flattened, "every, second dimension, interleaved"),
    "GRU": (lambda: Recurrent(nn.GRU), flattened, "every, second dimension, interleaved"),
    "last step": (Recurrent, last_step, "every, second dimension"),
    "transposed": (Recurrent, transposed, "every, second dimension"),
    "encoder": (encoder, flattened, "every, second dimension, interleaved"),
}


@pytest.mark.parametrize("length", [5, 6, 7])  # as many steps as examples, fewer, more
@pytest.mark.parametrize("name", TIME_FIRST)
def test_time_first_is_divided_along_the_examples(name, length):
    """T = N too: the outputs and targets of some examples are theirs."""
    make, outputs, division = TIME_FIRST[name]
    examples = 6
    x = normal(length, examples, 4)
    shape = {"last step": (examples,), "transposed": (examples, length)}
    y = labels(*shape.get(name, (length * examples,)))
    model = make().eval()
    network, batch = recorded(model, outputs(x), y)
    (part,) = batch.passes
    assert slicing(network, part) == division
    assert batch.examples == examples
    index = torch.tensor([1, 4])
    some = select(part, index, DIVISIONS[division])
    assert some.examples == 2
    (z,) = some.run(model)
    torch.testing.assert_close(z, outputs(x[:, index])(model), rtol=1e-10, atol=1e-12)
    whole = y if name in shape else y.reshape(length, examples)[:, index].reshape(-1)
    expected = y[index].reshape(-1) if name in shape else whole
    assert torch.equal(some.terms[0].targets, expected)


@pytest.mark.parametrize("length", [4, 6])
def test_examples_first_is_divided_along_the_first_dimension(length):
    x = normal(6, length, 4)
    for model in (Recurrent(batch_first=True), encoder(batch_first=True)):
        network, batch = recorded(model, flattened(x), labels(6 * length))
        assert slicing(network, batch.passes[0]) == "every"
        assert batch.examples == 6


def test_dropout_does_not_hide_that_examples_are_independent():
    """In train(), inside of attention and between the layers of an LSTM."""
    x = normal(6, 5, 4)
    network, batch = recorded(encoder(batch_first=True), flattened(x), labels(30))
    assert batch.passes[0].random
    assert slicing(network, batch.passes[0]) == "every"
    lstm = Recurrent()
    lstm.rnn = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)
    network, batch = recorded(lstm, flattened(x), labels(30))
    assert slicing(network, batch.passes[0]) == "every"


class Gated(nn.Module):
    """Mixes its examples through a gate that is zero in the beginning, as in ReZero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, C), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.gate * x.mean(dim=0))


class NotCopied(Gated):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("holds a file")


class NotCopiedEither(Gated):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise copy.Error("holds something else")


@pytest.mark.parametrize("kind", [Gated, NotCopied, NotCopiedEither])
def test_a_gate_that_is_still_closed_does_not_hide_that_examples_depend_on_each_other(kind):
    model = kind()
    before = [p.detach().clone() for p in model.double().parameters()]
    versions = [p._version for p in model.parameters()]
    network, batch = recorded(model, lambda m: m(normal(6, 4)), labels(6))
    assert slicing(network, batch.passes[0]) == "whole"
    assert all(map(torch.equal, model.parameters(), before))
    assert [p._version for p in model.parameters()] == versions


class Bounded(nn.Module):
    """Has a parameter that is valid within bounds alone."""

    def __init__(self, upper: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, C), nn.Parameter(torch.full((20, 1), 0.05))
        self.upper = upper

    def forward(self, x: Tensor) -> Tensor:
        if not ((self.scale > 0) & (self.scale < self.upper)).all():
            raise ValueError("the scale is out of bounds")
        return self.linear(x) / self.scale.mean()


def test_positive_parameters_stay_positive_in_the_trial():
    network, batch = recorded(Bounded(10), lambda m: m(normal(6, 4)), labels(6))
    assert slicing(network, batch.passes[0]) == "every"


def test_a_model_that_refuses_to_be_moved_is_used_whole():
    network, batch = recorded(Bounded(0.1), lambda m: m(normal(6, 4)), labels(6))
    assert slicing(network, batch.passes[0]) == "whole"


def test_frozen_parameters_are_not_copied_for_the_trial(monkeypatch):
    copied: list[torch.Size] = []
    deepcopy = nn.Parameter.__deepcopy__

    def counted(p: nn.Parameter, memo: dict[int, object]) -> nn.Parameter:
        if id(p) not in memo:
            copied.append(p.shape)
        return deepcopy(p, memo)

    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, C))
    model[0].requires_grad_(False)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    network, batch = recorded(model, lambda m: m(normal(6, 4)), labels(6))
    assert slicing(network, batch.passes[0]) == "every"
    assert copied == [(C, 7), (C,)]


def test_sequences_of_other_lengths_need_no_trial_of_their_own():
    model = Recurrent(batch_first=True)
    network, _ = recorded(model, flattened(normal(6, 5, 4)), labels(30))
    for length in (8, 9, 11):
        with record(model, network.objective) as recording:
            F.cross_entropy(flattened(normal(6, length, 4))(model), labels(6 * length)).backward()
        arrange(network, recording.batch())
    assert list(network.learned.slicing.values()) == ["every"]


@pytest.mark.parametrize("examples", [2, 3, 6])
def test_two_calls_whose_outputs_are_concatenated(examples):
    """Terms of an example do not stand together: n and N + n are of example n."""
    a, b, y = normal(examples, 4), normal(examples, 4, seed=1), labels(2 * examples)
    network, batch = recorded(mlp([4, 5, C]), lambda m: torch.cat([m(a), m(b)]), y)
    (part,) = batch.passes
    assert slicing(network, part) == "every, interleaved"
    some = select(part, torch.tensor([1]), DIVISIONS["every, interleaved"])
    (z,) = some.run(network.model)
    torch.testing.assert_close(z, network.model(torch.stack([a[1], b[1]])))
    assert torch.equal(some.terms[0].targets, y[[1, examples + 1]])


def test_constants_of_the_closure_are_divided_too():
    x, scale = normal(6, 4), normal(6, 1, seed=1)
    network, batch = recorded(mlp([4, C]), lambda m: m(x) * scale, labels(6))
    assert slicing(network, batch.passes[0]) == "every"


class Trimmed(nn.Module):
    """Returns as many steps as the longest sequence has, zeros behind the end of others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, C)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return self.linear(x[:, : mask.shape[1]]) * mask[:, :, None]


def among_themselves(model: nn.Module) -> Tensor:
    z = model(normal(6, 4))
    return z @ z.mT


WHOLE = {
    "similarities among themselves": (
        lambda: mlp([4, 5, 6]),
        among_themselves,
        6,
    ),
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
    "sequences trimmed to the longest": (
        Trimmed,
        lambda m: m(normal(6, 5, 4), torch.tensor([4, 4, 2, 4, 4, 4])).reshape(-1, C),
        24,
    ),
    "regression, time first": (Recurrent, lambda m: m(normal(5, 6, 4)).sum(dim=1), 5),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_can_not_be_divided_is_used_whole(name):
    make, outputs, terms = WHOLE[name]
    network, batch = recorded(make(), outputs, labels(terms))
    assert slicing(network, batch.passes[0]) == "whole"
    (some,) = subsets(network, batch, [1], seeded())
    assert some.passes == batch.passes


def test_similarities_with_other_examples_are_divided_along_the_first_ones():
    """Every row of logits is about one example and all of the others, which stay."""
    a, b = normal(6, 4), normal(6, 4, seed=1)
    network, batch = recorded(mlp([4, 5, 2]), lambda m: m(a) @ m(b).mT, labels(6))
    assert slicing(network, batch.passes[0]) == "first"
    some = select(batch.passes[0], torch.tensor([1, 4]), DIVISIONS["first"])
    torch.testing.assert_close(
        some.run(network.model)[0], network.model(a[[1, 4]]) @ network.model(b).mT
    )


def test_a_mean_over_subsets_is_the_fisher_of_all():
    """With time first: one example at a time, N of them, times N."""
    x = normal(5, 6, 4)
    network, batch = recorded(Recurrent(), flattened(x), labels(30))
    v = tuple(normal(*unit.shape, seed=n) for n, unit in enumerate(network.units))
    division = DIVISIONS[slicing(network, batch.passes[0])]
    with torch.no_grad():
        whole = fisher_gram(network, batch, [v])
        parts = [
            fisher_gram(
                network, Batch((select(batch.passes[0], torch.tensor([n]), division),)), [v]
            )
            for n in range(6)
        ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_run_on_some_of_the_examples_learns(batch_first):
    """A recurrent network in either layout, with a quarter of the examples for statistics."""
    x = normal(24, 5, 4)
    y = (x.sum(dim=(1, 2)) > 0).long()
    model = Recurrent(batch_first=batch_first).double()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), statistics_fraction=0.25, fisher_fraction=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        z = model(x if batch_first else x.transpose(0, 1))
        loss = F.cross_entropy(z[:, -1] if batch_first else z[-1], y)
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(8):
        loss = optimizer.step(closure)
    assert optimizer.report.examples == 24
    assert float(loss.detach()) < 0.7 * first


class Averaged(nn.Module):
    """BatchNorm, and a mean over the examples of its own if asked for."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, C))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z - z.mean(dim=0) if self.mixes else z


def test_some_examples_under_batch_norm_are_a_mini_batch_of_their_own():
    x = normal(200, 4)
    network, batch = recorded(Averaged(), lambda m: m(x), labels(200))
    S1, S2 = subsets(network, batch, [20, 100], seeded())
    assert (S1.examples, S2.examples) == (64, 100)  # no fewer to take statistics from
    assert all(m.training for m in network.model.modules())
    (call,) = S2.passes[0].calls
    with network.buffers.preserved():
        found, expected = S2.passes[0].run(network.model)[0], network.model(call.args[0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
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

"""J as a matrix, from the statistics' backward pass: against the dense Jacobian, and step by step."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.linearize import Explicit, Linearizer, Traced, can_be_explicit
from kronfac.model import Network
from kronfac.physics import Sin, WithDerivatives
from kronfac.record import Batch, record
from kronfac.record.examples import check_examples
from tests.conftest import ALGEBRA, network_of, normal

X, B = normal(20, 2), normal(6, 2, seed=1)


def solution(seed: int = 0, outputs: int = 1) -> WithDerivatives:
    torch.manual_seed(seed)
    layers = nn.Linear(2, 5), Sin(), nn.Linear(5, 4), Sin(), nn.Linear(4, outputs)
    return WithDerivatives(nn.Sequential(*layers).double())


def residuals(u: WithDerivatives) -> tuple[Tensor, Tensor]:
    jet = u(X)
    return jet.second[:, 0] + jet.first[:, 0] * jet.value, u.perceptron(B)


def loss_of(u: WithDerivatives) -> Tensor:
    inside, boundary = residuals(u)
    return kronfac.least_squares(inside + 1) + kronfac.least_squares(boundary, 10.0)


def recorded(u: nn.Module, loss=loss_of) -> tuple[Network, Batch]:
    network = network_of(u)
    with record(u, network.objective) as recording:
        loss(u).backward()
    network.learned.compared = True
    return network, check_examples(network, recording.batch())


def dense(network: Network, z: Tensor) -> Tensor:
    """∂z/∂θ, (examples, parameters), example by example."""
    rows = []
    for number in z.flatten():
        grads = torch.autograd.grad(number, network.parameters, retain_graph=True)
        rows.append(torch.cat([V.reshape(-1) for V in network.join(grads)]))
    return torch.stack(rows)


def kept(network: Network, batch: Batch, vectors: list[Tensor]) -> Linearizer:
    around = Linearizer(network, keeps=True)
    for part, r in zip(batch.passes, vectors, strict=True):
        around.for_statistics(part).taps([r])
    return around


def test_products_are_those_of_the_dense_jacobian():
    u = solution()
    network, batch = recorded(u)
    around = kept(network, batch, [normal(20, 1, seed=2), normal(6, 1, seed=3)])
    directions = [tuple(normal(*V.shape, seed=n) for V in network.theta()) for n in (4, 5)]
    # The boundary is what the closure's graph has first or last; the number of examples says which.
    expected = {len(z): (dense(network, z), z) for z in residuals(u)}
    assert sorted(part.examples for part in batch.passes) == [6, 20]
    for part in batch.passes:
        J, z = expected[part.examples]
        view = around(part)
        assert isinstance(view, Explicit)
        flat = torch.stack([torch.cat([V.reshape(-1) for V in v]) for v in directions])
        (Jv,) = view.jvp(directions)
        assert_close(Jv, (flat @ J.mT).unsqueeze(-1), **ALGEBRA)
        shift = 1.0 if part.examples == 20 else 0.0
        assert_close(view.outputs[0], z.detach() + shift, **ALGEBRA)
        r = normal(part.examples, 1, seed=6)
        found = torch.cat([V.reshape(-1) for V in view.vjp([r])])
        assert_close(found, J.mT @ r[:, 0], **ALGEBRA)


def test_a_backward_pass_from_zeros_shows_no_rows():
    """Then products come by passes, as ever."""
    network, batch = recorded(solution())
    vectors = [normal(part.examples, 1, seed=2) for part in batch.passes]
    vectors[0][3] = 0.0
    view = kept(network, batch, vectors)(batch.passes[0])
    v = tuple(normal(*V.shape, seed=3) for V in network.theta())
    (found,), (expected,) = view.jvp([v]), Traced(network, batch.passes[0]).jvp([v])
    assert_close(found, expected, **ALGEBRA)


def test_examples_whose_rows_were_not_kept_are_linearized_by_passes():
    network, batch = recorded(solution())
    around = kept(network, batch, [normal(part.examples, 1, seed=2) for part in batch.passes])
    _, other = recorded(solution())
    assert isinstance(around(other.passes[0]), Traced)
    assert isinstance(Linearizer(network).for_statistics(batch.passes[0]), Traced)


class MeanRemoved(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1).double()

    def forward(self, x):
        z = self.layer(x.tanh())
        return z - z.mean(dim=0)


def squares_of(model: nn.Module) -> Tensor:
    return kronfac.least_squares(model(X))


def test_which_examples_can_have_their_rows(monkeypatch):
    """One output each, which depends on no other example; after a comparison; of small networks."""
    network, batch = recorded(solution())
    assert sum(p.numel() for p in network.parameters) == 44
    for size, fits in ((26 * 44, True), (26 * 44 - 1, False)):
        with monkeypatch.context() as patched:
            patched.setattr("kronfac.linearize.explicit.WORK_SPACE", size)
            assert can_be_explicit(network, batch) == fits
    for compared, forward_mode in ((False, True), (True, False)):
        network.learned.compared, network.learned.forward_mode = compared, forward_mode
        assert not can_be_explicit(network, batch)
    two = recorded(solution(outputs=2), lambda u: kronfac.least_squares(u.perceptron(B)))
    assert not can_be_explicit(*two)
    normalised = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    assert not can_be_explicit(*recorded(normalised, squares_of))
    assert can_be_explicit(*recorded(normalised.eval(), squares_of))
    assert not can_be_explicit(*recorded(MeanRemoved(), squares_of))


@pytest.mark.parametrize("options", [{}, {"step_rule": kronfac.ConjugateGradients(cg_steps=3)}])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_steps_are_those_by_passes(fisher, options, monkeypatch):
    def run() -> list[Tensor]:
        u = solution()
        optimizer = kronfac.KFAC(u, nn.MSELoss(), fisher=fisher, **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(u)
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        return [p.detach() for p in u.parameters()]

    found = run()
    monkeypatch.setattr("kronfac.step.examples.can_be_explicit", lambda network, batch: False)
    for p, expected in zip(found, run(), strict=True):
        assert_close(p, expected, rtol=1e-8, atol=1e-10)

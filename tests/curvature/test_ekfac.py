"""EKFAC against the dense definition: the diagonal of the Fisher in the eigenbasis of A ⊗ G."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import (
    Curvature,
    DiagonalMoments,
    EigenvalueCorrectedInverse,
    ExactFisher,
    ExactTikhonov,
    FactoredTikhonov,
    KroneckerBlock,
    KroneckerMoments,
    SampledFisher,
    SummedGradient,
    Tap,
    taps,
)
from kronfac.linalg import InverseInEigenbasis
from kronfac.storage import pack, unpack
from tests.conformance import CHECKS, Case, assert_relative
from tests.conftest import ALGEBRA, AUTODIFF, batch, mlp, network_of, normal, seeded, spd
from tests.curvature.test_estimate import estimate_on
from tests.reference import dense

LOSSES = {
    "gaussian": (nn.MSELoss, {"variance": 0.5, "scale": 1 / 3}),
    "bernoulli": (nn.BCEWithLogitsLoss, {"scale": 1 / 3}),
    "categorical": (nn.CrossEntropyLoss, {}),
}
WIDTHS, EXAMPLES = [4, 5, 4, 3], 14
GAMMA = 0.2


def blocks_of(F, network):
    """The diagonal blocks of a matrix over the parameters in the order of the units."""
    sizes = [unit.shape[0] * unit.shape[1] for unit in network.units]
    return [row.split(sizes, dim=1)[i] for i, row in enumerate(F.split(sizes))]


def dense_fisher(network, part):
    """Σ_t s J_tᵀ J_t / σ² for a Gaussian, vec(V) of every unit stacking columns."""
    (terms,) = part.terms
    (z,) = part.run(network.model)
    rows = []
    for output in terms.matrix(z).reshape(-1):
        grads = torch.autograd.grad(output, network.parameters, retain_graph=True)
        rows.append(dense.flatten(network.join(grads)))
    J = torch.stack(rows)
    return terms.scale / terms.likelihood.variance * J.mT @ J


class Pooled(nn.Module):
    """The mean over the places of a sequence, between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp([3, 4])[0], mlp([4, 2], seed=1)[0]

    def forward(self, x):
        return self.second(self.first(x).mean(dim=1))


class Anything(nn.Module):
    """A layer used twice, a tied weight, a scale, a mean over places; nothing in it is linear."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = mlp([3, 3])[0], mlp([3, 3], seed=1)[0]
        self.out.weight = self.inner.weight
        self.scale = nn.Parameter(normal(3, seed=2))

    def forward(self, x):
        h = torch.tanh(self.inner(x + torch.tanh(self.inner(x)))) * self.scale
        return self.out(h).mean(dim=1)


def observe(network, rows, strategy=None, fisher=None, decay=0.0):
    """The curvature on these examples, and the inverse from it that has seen them too; ε = 0: only them."""
    strategy, fisher = strategy or EigenvalueCorrectedInverse(), fisher or ExactFisher()
    curvature = estimate_on(network, rows, fisher)
    update = strategy.between_refreshes(strategy.prepare(curvature).damped(GAMMA), decay)
    estimate_on(network, rows, fisher, update=update)
    return curvature, update.value()


def basis(operator):
    rows, columns = operator.S.shape
    sides = ((operator.E_A, columns), (operator.E_G, rows))
    return dense.kron(*(torch.eye(n).double() if E is None else E for E, n in sides))


def mlp_and_fisher(likelihood, x=None):
    loss, numbers = LOSSES[likelihood]
    model = mlp(WIDTHS)
    x = normal(EXAMPLES, WIDTHS[0]) if x is None else x
    network = network_of(model, loss())
    rows = batch(network, x, torch.zeros(len(x), dtype=torch.long) if not numbers else None)
    return network, rows, blocks_of(dense.exact_fisher(model, x, likelihood, **numbers), network)


# ------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("likelihood", LOSSES)
def test_second_moments_are_the_fishers_diagonal_in_the_eigenbasis(likelihood):
    network, rows, fisher = mlp_and_fisher(likelihood)
    curvature, inverse = observe(network, rows)
    for moments, operator, F in zip(curvature.blocks, inverse.pieces, fisher, strict=True):
        E = basis(operator)
        assert_close(E.mT @ E, torch.eye(len(E)).double(), **ALGEBRA)
        rotated = E.mT @ dense.kron(moments.A, moments.G) @ E
        assert_relative(rotated, torch.diag(rotated.diagonal()))
        assert_close(dense.vec(operator.S), (E.mT @ F @ E).diagonal(), **AUTODIFF)


@pytest.mark.parametrize("likelihood", LOSSES)
def test_it_is_nearer_to_the_fisher_than_the_kronecker_product(likelihood):
    network, rows, fisher = mlp_and_fisher(likelihood)
    curvature, inverse = observe(network, rows)
    distances = []
    for moments, operator, F in zip(curvature.blocks, inverse.pieces, fisher, strict=True):
        E = basis(operator)
        corrected = E @ torch.diag(dense.vec(operator.S)) @ E.mT
        assert_close(corrected, dense.eigenvalue_corrected(F, E), **AUTODIFF)
        nearest = (F - corrected).norm()
        distances.append((nearest, (F - dense.kron(moments.A, moments.G)).norm()))
        for seed in range(5):  # no other diagonal is nearer
            other = dense.vec(operator.S) + 1e-3 * normal(len(E), seed=seed)
            assert nearest < (F - E @ torch.diag(other) @ E.mT).norm()
    assert all(corrected <= product + 1e-12 for corrected, product in distances)
    assert any(corrected < 0.95 * product for corrected, product in distances)


def test_in_a_deep_linear_network_there_is_nothing_to_correct():
    model, x = mlp(WIDTHS, "identity"), normal(EXAMPLES, WIDTHS[0])
    network = network_of(model, nn.MSELoss())
    curvature, inverse = observe(network, batch(network, x, None))
    first = EigenvalueCorrectedInverse().prepare(curvature).damped(GAMMA)
    for before, after in zip(first.pieces, inverse.pieces, strict=True):
        assert_close(after.S, before.S, **AUTODIFF)


# ------------------------------------------------------------------------------ places, uses, passes


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("make", [Pooled, Anything])
def test_places_and_uses_of_an_example_add_up_before_they_are_squared(
    make, chunk, sharing, monkeypatch
):
    """A layer at several places, one used twice, a tied weight, biases alone, whatever the memory."""
    if chunk is not None:
        monkeypatch.setattr(taps, "WORK_SPACE", chunk)
    model, x = make(), normal(6, 5, 3)
    network = network_of(model, nn.MSELoss())
    units = [
        replace(unit, block=KroneckerBlock(sharing) if unit.chosen else unit.block)
        for unit in network.units
    ]
    network = replace(network, units=units)
    rows = batch(network, x, torch.zeros(6, model(x).shape[1]).double())
    _, inverse = observe(network, rows)
    fisher = blocks_of(dense_fisher(network, rows.passes[0]), network)
    seen = 0
    for operator, F in zip(inverse.pieces, fisher, strict=True):
        if isinstance(operator, InverseInEigenbasis):
            E = basis(operator)
            assert_close(dense.vec(operator.S), (E.mT @ F @ E).diagonal(), **AUTODIFF)
            seen += 1
    assert seen == sum(unit.chosen for unit in units) >= 2


def test_micro_batches_and_several_draws_give_the_same():
    model, x = mlp(WIDTHS), normal(EXAMPLES, WIDTHS[0])
    network = network_of(model, nn.MSELoss())
    fisher = SampledFisher(samples=2)
    found = []
    for chunk in (None, 4):
        rows = batch(network, x, None, chunk)
        strategy = EigenvalueCorrectedInverse()
        curvature = estimate_on(network, batch(network, x, None), ExactFisher())
        update = strategy.between_refreshes(strategy.prepare(curvature).damped(GAMMA), 0.0)
        estimate_on(network, rows, fisher, seeded(3), update=update)
        found.append(update.value())
    for whole, parts in zip(found[0].pieces, found[1].pieces, strict=True):
        assert_close(parts.S, whole.S, **ALGEBRA)


def test_a_side_that_is_diagonal_keeps_its_own_basis():
    model, x = mlp(WIDTHS), normal(EXAMPLES, WIDTHS[0])
    network = network_of(model, nn.MSELoss())
    block = KroneckerBlock(diagonal_inputs=True)
    network = replace(network, units=[replace(unit, block=block) for unit in network.units])
    _, inverse = observe(network, batch(network, x, None))
    loss = LOSSES["gaussian"][1]
    fisher = blocks_of(dense.exact_fisher(model, x, "gaussian", **loss), network)
    for operator, F in zip(inverse.pieces, fisher, strict=True):
        assert operator.E_A is None
        E = basis(operator)
        assert_close(dense.vec(operator.S), (E.mT @ F @ E).diagonal(), **AUTODIFF)
        V = normal(*operator.S.shape)
        assert_close(dense.vec(operator.mv(V)), operator.to_dense() @ dense.vec(V), **ALGEBRA)
        loaded = unpack(pack(operator))
        assert loaded.E_A is None
        assert torch.equal(loaded.mv(V), operator.mv(V))


def test_sampled_targets_give_the_exact_second_moments_on_average():
    """Within five standard errors of the mean of 60 independent estimates."""
    network, rows, _ = mlp_and_fisher("categorical")
    curvature, exact = observe(network, rows)
    strategy = EigenvalueCorrectedInverse()
    first = strategy.prepare(curvature).damped(GAMMA)
    generator, estimates = seeded(), []
    for _ in range(60):
        update = strategy.between_refreshes(first, 0.0)
        estimate_on(network, rows, SampledFisher(samples=3), generator, update=update)
        estimates.append(torch.cat([operator.S.flatten() for operator in update.value().pieces]))
    found = torch.stack(estimates)
    error = found.std(dim=0) / len(found) ** 0.5
    expected = torch.cat([operator.S.flatten() for operator in exact.pieces])
    assert ((found.mean(dim=0) - expected).abs() <= 5 * error + 1e-12).all()
    assert (
        float((error / expected.clamp(min=1e-12)).median()) < 0.2
    )  # so that the bound says something


# ------------------------------------------------------------------------------------------- operator


def conformance_case(likelihood, tikhonov):
    def observed():
        network, rows, fisher = mlp_and_fisher(likelihood)
        return *observe(network, rows, EigenvalueCorrectedInverse(tikhonov)), fisher

    def matrix():
        """E (diag(Eᵀ F E) + what the damping adds to A ⊗ G) Eᵀ, in dense blocks."""
        curvature, inverse, fisher = observed()
        blocks = []
        for moments, operator, F in zip(curvature.blocks, inverse.pieces, fisher, strict=True):
            A, G = [[moments.A]], [[moments.G]]
            if isinstance(tikhonov, FactoredTikhonov):
                damped = dense.kron_fisher(*dense.factored_tikhonov(A, G, GAMMA, tikhonov.norm))
            else:
                damped = dense.exact_tikhonov(A, G, GAMMA)
            added = damped - dense.kron(moments.A, moments.G)
            blocks.append(dense.eigenvalue_corrected(F, basis(operator)) + added)
        return torch.block_diag(*blocks)

    shapes = [tuple(b.G.shape[:1] + b.A.shape[:1]) for b in observed()[0].blocks]
    return Case(f"{likelihood}-{tikhonov}", lambda: observed()[1].mv, matrix, shapes)


CASES = [
    conformance_case(likelihood, tikhonov)
    for likelihood in LOSSES
    for tikhonov in (ExactTikhonov(), FactoredTikhonov(), FactoredTikhonov("one"))
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


# ------------------------------------------------------------------------------------- moving average


def test_the_kronecker_eigenvalues_count_as_one_step_until_the_memory_is_full():
    network, rows, _ = mlp_and_fisher("gaussian")
    strategy, decay = EigenvalueCorrectedInverse(), 0.75
    curvature = estimate_on(network, rows, ExactFisher())
    inverse = strategy.prepare(curvature).damped(GAMMA)
    S = [operator.S for operator in inverse.pieces]
    estimates = []
    for n in range(6):
        other = batch(network, normal(EXAMPLES, WIDTHS[0], seed=10 + n), None)
        fresh = strategy.between_refreshes(inverse, 0.0)
        estimate_on(network, other, ExactFisher(), update=fresh)
        estimates.append([operator.S for operator in fresh.value().pieces])
        update = strategy.between_refreshes(inverse, decay)
        estimate_on(network, other, ExactFisher(), update=update)
        before, inverse = inverse, update.value()
        for i, operator in enumerate(inverse.pieces):
            assert operator.observed == n + 1
            if n + 2 <= 4:  # = 1 / (1 − ε)
                expected = sum([S[i], *(e[i] for e in estimates)]) / (n + 2)
            else:
                expected = decay * before.pieces[i].S + (1 - decay) * estimates[n][i]
            assert_close(operator.S, expected, **ALGEBRA)
            assert operator.E_A is before.pieces[i].E_A


def test_a_unit_that_was_not_used_stays_as_it_is():
    network, rows, _ = mlp_and_fisher("gaussian")
    strategy = EigenvalueCorrectedInverse()
    inverse = strategy.prepare(estimate_on(network, rows, ExactFisher())).damped(GAMMA)
    update = strategy.between_refreshes(inverse, 0.9)
    V = normal(4, 6)
    update.add([[], SummedGradient(V), [Tap(normal(2, 1, 5), normal(2, 1, 3))]], 1.0)
    after = update.value()
    assert [operator.observed for operator in after.pieces] == [0, 0, 1]
    assert after.pieces[:2] == inverse.pieces[:2]


# ------------------------------------------------------------------------------------ blocks, failures


def test_other_blocks_have_their_own_inverses():
    diagonal = DiagonalMoments(normal(3, 4).square())
    curvature = Curvature((KroneckerMoments(spd(4), spd(3)), diagonal))
    strategy = EigenvalueCorrectedInverse()
    inverse = strategy.prepare(curvature).damped(GAMMA)
    V = normal(3, 4)
    own = diagonal.damped(GAMMA, FactoredTikhonov())
    assert torch.equal(inverse.mv((V, V))[1], own.mv(V))
    update = strategy.between_refreshes(inverse, 0.9)
    tap = Tap(normal(2, 1, 4), normal(2, 1, 3))
    update.add([[tap], [tap]], 1.0)
    assert update.value().pieces[1] is inverse.pieces[1]


@pytest.mark.parametrize("side", ["A", "G"])
def test_a_failed_eigendecomposition_concerns_its_block_alone(side):
    good = KroneckerMoments(spd(4), spd(3))
    bad = replace(good, **{side: torch.full_like(getattr(good, side), torch.nan)})
    strategy = EigenvalueCorrectedInverse()
    inverse = strategy.prepare(Curvature((good, bad, good))).damped(GAMMA)
    ((number, message),) = inverse.failures
    assert number == 1
    assert f"{side}[1]" in message
    old = strategy.prepare(Curvature((good,) * 3)).damped(0.5)
    completed = inverse.completed_by(old)
    assert completed.pieces[1] is old.pieces[1]
    assert completed.pieces[0] is inverse.pieces[0]


@pytest.mark.parametrize("tikhonov", [ExactTikhonov(), FactoredTikhonov()])
def test_without_damping_in_its_precision_there_is_no_inverse(tikhonov):
    zero = KroneckerMoments(torch.zeros(4, 4), torch.zeros(3, 3))
    prepared = EigenvalueCorrectedInverse(tikhonov).prepare(Curvature((zero,)))
    assert not prepared.damped(1e-3).failures
    assert len(prepared.damped(1e-30).failures) == 1


def test_squares_that_float32_can_not_hold_leave_the_old_values():
    huge = KroneckerMoments(1e25 * torch.eye(4), 1e25 * torch.eye(3))
    strategy = EigenvalueCorrectedInverse(ExactTikhonov())
    inverse = strategy.prepare(Curvature((huge,))).damped(1.0)
    (operator,) = inverse.pieces
    assert operator.S.isfinite().all()
    update = strategy.between_refreshes(inverse, 0.9)
    a, g = torch.ones(1, 1, 4), torch.ones(1, 1, 3)
    a[..., 0], g[..., 0], g[..., 1] = 1e25, 1e25, 0.0
    update.add([[Tap(a, g)]], 1.0)
    (after,) = update.value().pieces
    assert after.S.isfinite().all()
    assert not torch.equal(after.S, operator.S)
    assert after.mv(torch.ones(3, 4)).isfinite().all()

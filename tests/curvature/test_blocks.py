"""Every block against the dense second moment of the examples' gradients."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    Block,
    BlockDiagonalInverse,
    Curvature,
    DenseBlock,
    DiagonalBlock,
    DiagonalMoments,
    ExactTikhonov,
    FactoredTikhonov,
    GroupedKroneckerBlock,
    GroupedTap,
    KroneckerBlock,
    KroneckerMoments,
    KroneckerSumBlock,
    KroneckerSumMoments,
    OneHot,
    SampledFisher,
    SummedGradient,
    Tap,
)
from kronfac.curvature.estimate import Sample
from kronfac.curvature.estimate import estimate as estimate_all
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError, StateError
from kronfac.linalg import OuterProduct
from kronfac.storage import Layout, pack, unpack
from kronfac.testing import check_block
from tests.conformance import assert_relative
from tests.conftest import ALGEBRA, normal, seeded, spd
from tests.curvature.test_curvature import Part
from tests.reference import dense

ROWS, COLUMNS, GROUPS = 4, 3, 2
EACH = ROWS // GROUPS
EXAMPLES = 5
GAMMA = 0.3
NORMS = ["trace", "one"]
SIDES = list(product([False, True], repeat=4))


def direct(places: int = 2, seed: int = 0) -> Tap:
    inputs = normal(EXAMPLES, places, COLUMNS, seed=seed)
    return Tap(inputs, normal(EXAMPLES, places, ROWS, seed=seed + 1))


def transposed(places: int = 2, seed: int = 2) -> Tap:
    inputs = normal(EXAMPLES, places, ROWS, seed=seed)
    return Tap(inputs, normal(EXAMPLES, places, COLUMNS, seed=seed + 1), transposed=True)


def grouped(places: int = 2, seed: int = 4) -> GroupedTap:
    inputs = normal(GROUPS, EXAMPLES, places, COLUMNS, seed=seed)
    return GroupedTap(inputs, normal(GROUPS, EXAMPLES, places, EACH, seed=seed + 1))


def taps(*places: int, seed: int = 0) -> list[Tap]:
    """One direct use for each number of places."""
    return [direct(n, seed + 10 * i) for i, n in enumerate(places)]


def tied(sides: tuple[bool, ...] = (False,) * 4, sharing: str = "expand") -> KroneckerSumBlock:
    return KroneckerSumBlock(
        KroneckerBlock(sharing, *sides[:2]), KroneckerBlock(sharing, *sides[2:])
    )


MAKE = {"direct": direct, "transposed": transposed, "grouped": grouped}
CASES: dict[str, tuple[Block, tuple[str, ...]]] = {
    "expand": (KroneckerBlock(), ("direct",)),
    "reduce": (KroneckerBlock("reduce"), ("direct", "direct")),
    "diagonal A": (KroneckerBlock(diagonal_inputs=True), ("direct",)),
    "diagonal A and G": (KroneckerBlock("expand", True, True), ("direct",)),
    "transposed": (KroneckerBlock(diagonal_grads=True), ("transposed",)),
    "diagonal": (DiagonalBlock(), ("direct",)),
    "dense": (DenseBlock(), ("direct", "direct")),
    "dense, both directions": (DenseBlock(), ("direct", "transposed")),
    "dense in pieces": (DenseBlock(limit=6), ("direct",)),
    "grouped": (GroupedKroneckerBlock(), ("grouped",)),
    "grouped, two uses": (GroupedKroneckerBlock(), ("grouped", "grouped")),
    "tied": (tied(), ("direct", "transposed", "transposed", "direct")),
    "tied, reduce": (tied(sharing="reduce"), ("direct", "transposed")),
    "tied, used in one direction": (tied(), ("direct",)),
    "tied, used in the other": (tied(), ("transposed",)),
    **{f"tied {sides}": (tied(sides), ("direct", "transposed")) for sides in SIDES[1:]},
}
each_block = pytest.mark.parametrize(("block", "uses"), CASES.values(), ids=CASES)


def seen(uses: tuple[str, ...]) -> list:
    return [MAKE[way](seed=10 * i) for i, way in enumerate(uses)]


def gradients(uses: list) -> list[torch.Tensor]:
    """vec(Σ_uses Σ_places g āᵀ) of every example, one product at a time."""
    found = []
    for n in range(EXAMPLES):
        total = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        for tap in uses:
            for g, a in zip(tap.grads[n], tap.inputs[n], strict=True):
                total += torch.outer(a, g) if tap.transposed else torch.outer(g, a)
        found.append(dense.vec(total))
    return found


def second_moment(uses: list) -> torch.Tensor:
    return sum(torch.outer(v, v) for v in gradients(uses))


def moment(x: torch.Tensor, diagonal: bool = False) -> torch.Tensor:
    """Σ x xᵀ over all vectors, one at a time; of which only the diagonal may be kept."""
    total = sum(torch.outer(v, v) for v in x.reshape(-1, x.shape[-1]))
    return torch.diag(total.diagonal()) if diagonal else total


# ------------------------------------------------------------------------------------------ moments


@each_block
def test_it_conforms(block, uses):
    check_block(block, rows=ROWS, columns=COLUMNS, uses=uses)


each_use = pytest.mark.parametrize("places", [(1,), (3,), (1, 1), (2, 4)], ids=str)


@each_use
def test_dense_and_diagonal_blocks_are_the_second_moment_of_the_gradients(places):
    uses, expected = taps(*places), 0.7 * second_moment(taps(*places))
    assert_close(DenseBlock().observe(uses, 0.7).dense(), expected, **ALGEBRA)
    diagonal = DiagonalBlock().observe(uses, 0.7).dense()
    assert_close(diagonal, torch.diag(expected.diagonal()), **ALGEBRA)


@each_use
def test_expand_takes_every_place_for_an_example(places):
    """A is a mean over all places of all examples; G is their sum, not divided by the places."""
    uses = taps(*places)
    a, g = (torch.cat([x.flatten(0, 1) for x in xs]) for xs in zip(*map(_pair, uses), strict=True))
    moments = KroneckerBlock("expand").observe(uses, 0.7)
    assert len(a) == EXAMPLES * sum(places)
    assert_close(moments.A, moment(a) / len(a), **ALGEBRA)
    assert_close(moments.G, 0.7 * moment(g), **ALGEBRA)


@each_use
def test_reduce_takes_the_places_of_an_example_together(places):
    """A from the mean of an example's ā, G from the sum of its g."""
    uses = taps(*places)
    a, g = (torch.cat(xs, dim=1) for xs in zip(*map(_pair, uses), strict=True))
    moments = KroneckerBlock("reduce").observe(uses, 0.7)
    assert_close(moments.A, moment(a.mean(dim=1)) / EXAMPLES, **ALGEBRA)
    assert_close(moments.G, 0.7 * moment(g.sum(dim=1)), **ALGEBRA)


def _pair(tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
    return tap.inputs, tap.grads


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("places", [(1,), (3,), (2, 2)], ids=str)
def test_factors_are_exact_where_inputs_and_gradients_do_not_vary(places, sharing):
    """With the same ā and g at all places, reduce is exact; expand too, but for places that add up."""
    a, g = normal(COLUMNS), normal(ROWS, seed=1)
    uses = [Tap(a.expand(EXAMPLES, n, -1), g.expand(EXAMPLES, n, -1)) for n in places]
    found = KroneckerBlock(sharing).observe(uses, 1.0).dense()
    count = sum(places)
    together = second_moment(uses)  # (count g āᵀ)² of every example
    assert_close(found, together if sharing == "reduce" else together / count, **ALGEBRA)


@pytest.mark.parametrize("side", ["diagonal_inputs", "diagonal_grads"])
def test_a_side_may_be_kept_as_its_diagonal(side):
    uses = taps(2, 1)
    whole = KroneckerBlock().observe(uses, 0.7)
    moments = KroneckerBlock(**{side: True}).observe(uses, 0.7)
    diagonal, full = ("A", "G") if side == "diagonal_inputs" else ("G", "A")
    assert_close(getattr(moments, diagonal), getattr(whole, diagonal).diagonal(), **ALGEBRA)
    assert torch.equal(getattr(moments, full), getattr(whole, full))


def test_a_gradient_whose_uses_are_not_seen_is_squared():
    V = normal(ROWS, COLUMNS)
    assert_close(DiagonalBlock().observe(SummedGradient(V), 0.7).D, 0.7 * V**2, **ALGEBRA)
    M = DenseBlock().observe(SummedGradient(V), 0.7).dense()
    assert_close(M, 0.7 * torch.outer(dense.vec(V), dense.vec(V)), **ALGEBRA)


def grouped_factors(uses: list[GroupedTap], weight: float) -> list[list[torch.Tensor]]:
    """A and G of every group."""
    pairs = []
    for group in range(GROUPS):
        a = torch.cat([use.inputs[group].flatten(0, 1) for use in uses])
        g = torch.cat([use.grads[group].flatten(0, 1) for use in uses])
        pairs.append([moment(a) / len(a), weight * moment(g)])
    return pairs


def on_the_diagonal(pairs) -> torch.Tensor:
    """The matrix over vec(V) that has A ⊗ G of every group, entry by entry."""
    matrix = torch.zeros(COLUMNS, ROWS, COLUMNS, ROWS, dtype=torch.float64)
    for number, (A, G) in enumerate(pairs):
        part = slice(number * EACH, (number + 1) * EACH)
        matrix[:, part, :, part] = torch.einsum("ij,kl->ikjl", A, G)
    return matrix.reshape(ROWS * COLUMNS, ROWS * COLUMNS)


def test_a_grouped_block_is_a_product_per_group():
    uses = [grouped(), grouped(places=1, seed=7)]
    found = GroupedKroneckerBlock().observe(uses, 0.7).dense()
    assert_close(found, on_the_diagonal(grouped_factors(uses, 0.7)), **ALGEBRA)


def tied_factors(uses: list[Tap], sides: tuple[bool, ...], weight: float):
    """[[A₁, G₁], [A₂, G₂]] by their definition."""
    pairs = []
    for way in (False, True):
        part = [tap for tap in uses if tap.transposed == way]
        a, g = (
            torch.cat([x.flatten(0, 1) for x in xs]) for xs in zip(*map(_pair, part), strict=True)
        )
        columns, rows = (g, a) if way else (a, g)
        weights = (weight, 1 / len(a)) if way else (1 / len(a), weight)
        factors = zip((columns, rows), sides[2 * way : 2 * way + 2], weights, strict=True)
        pairs.append([w * moment(x, diagonal) for x, diagonal, w in factors])
    return pairs


@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_a_tied_block_is_the_sum_of_both_products(sides):
    uses = [direct(), transposed(), direct(places=1, seed=7)]
    found = tied(sides).observe(uses, 0.7).dense()
    expected = sum(dense.kron(A, G) for A, G in tied_factors(uses, sides, 0.7))
    assert_close(found, expected, **ALGEBRA)


@pytest.mark.parametrize("block", [GroupedKroneckerBlock(), KroneckerBlock()], ids=["grouped", ""])
def test_the_mean_over_the_inputs_is_one_over_all_passes(block):
    """However many places their examples have, and with an old average."""
    make = direct if isinstance(block, KroneckerBlock) else grouped
    uses, old = [make(), make(places=1, seed=7), make(seed=9)], block.observe([make(seed=50)], 0.7)
    average = block.average(old, 0.9)
    for use in uses:
        average.add([use], 1.0, 0.7)
    expected, found = block.observe(uses, 0.7), average.value()
    for name in ("A", "G"):
        mixed = 0.9 * getattr(old, name) + 0.1 * getattr(expected, name)
        assert_close(getattr(found, name), mixed, **ALGEBRA)


@each_block
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_probe_finds_numbers_that_are_not_finite(block, uses, bad):
    given = seen(uses)
    assert all(bool(number.isfinite()) for number in block.observe(given, 0.7).probe())
    given[-1].grads[1, 0, 0] = bad
    moments = block.observe(given, 0.7)
    assert not all(bool(number.isfinite()) for number in moments.probe())
    if isinstance(block, DiagonalBlock):
        return  # 1 / ∞ = 0
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(GAMMA, FactoredTikhonov())


def test_the_sampling_error_of_several_products():
    """Over the same parameters their sum, over parts of them their mean; diagonals have single numbers."""

    def error(moments):
        return Curvature((moments,), examples=7.0).sampling_error()

    both = tied().observe([direct(), transposed()], 0.7)
    assert error(both) == pytest.approx(error(both.direct) + error(both.transposed))
    assert error(both) == pytest.approx(float(both.trace()) / 49)
    groups = GroupedKroneckerBlock().observe([grouped()], 0.7)
    apart = [KroneckerMoments(*pair) for pair in zip(groups.A, groups.G, strict=True)]
    mean = Curvature(tuple(apart), examples=7.0).sampling_error()
    assert error(groups) == pytest.approx(mean)
    whole = KroneckerMoments(spd(COLUMNS), spd(ROWS))
    wide = KroneckerMoments(whole.A, whole.G.diagonal())
    assert error(wide) == pytest.approx(error(whole) / ROWS)


# ------------------------------------------------------------------------------------------ inverses


def damped_pair(A, G, gamma, norm):
    A, G = (torch.diag(M) if M.dim() == 1 else M for M in (A, G))
    damped_A, damped_G = dense.factored_tikhonov([[A]], [[G]], gamma, norm)
    return damped_A[0][0], damped_G[0][0]


def damped_sum(pairs, gamma: float, norm: str = "trace") -> torch.Tensor:
    """Σₖ (Aₖ + πₖγₖI) ⊗ (Gₖ + γₖ/πₖ I) with γₖ² in proportion to the size of Aₖ ⊗ Gₖ."""

    def size(M: torch.Tensor) -> float:
        M = torch.diag(M) if M.dim() == 1 else M
        return float(M.trace() / len(M))

    sizes = [size(A) * size(G) for A, G in pairs]
    parts = [gamma * (own / sum(sizes)) ** 0.5 for own in sizes]
    return sum(
        dense.kron(*damped_pair(A, G, part, norm))
        for (A, G), part in zip(pairs, parts, strict=True)
        if part  # a product that vanishes has no damping
    )


def damped_truth(moments, tikhonov) -> torch.Tensor:
    """The damped matrix. Groups and sums have no exact form: the factored one replaces it."""
    norm = getattr(tikhonov, "norm", "trace")
    if isinstance(moments, KroneckerSumMoments):
        pairs = [(m.A, m.G) for m in (moments.direct, moments.transposed)]
        return damped_sum(pairs, GAMMA, norm)
    factored = getattr(moments, "A", None) is not None
    if factored and moments.A.dim() == 3:
        pairs = zip(moments.A, moments.G, strict=True)
        return on_the_diagonal([damped_pair(A, G, GAMMA, norm) for A, G in pairs])
    if factored and isinstance(tikhonov, FactoredTikhonov):
        return dense.kron(*damped_pair(moments.A, moments.G, GAMMA, norm))
    matrix = moments.dense()
    return matrix + GAMMA**2 * torch.eye(len(matrix)).double()


@each_block
@pytest.mark.parametrize("tikhonov", [*map(FactoredTikhonov, NORMS), ExactTikhonov()], ids=str)
def test_the_operator_is_the_inverse_of_the_damped_matrix(block, uses, tikhonov):
    """By itself, and loaded from a saved inverse of all units."""
    moments = block.observe(seen(uses), 0.7)
    expected = torch.linalg.inv(damped_truth(moments, tikhonov))
    operator = moments.damped(GAMMA, tikhonov)
    assert_relative(operator.to_dense(), expected)
    V = normal(ROWS, COLUMNS, seed=9)
    prepared = BlockDiagonalInverse(tikhonov).prepare(Curvature((moments,)))
    (found,) = unpack(pack(prepared.damped(GAMMA))).mv([V])
    assert_relative(dense.vec(found), expected @ dense.vec(V))


@each_block
def test_a_product_is_a_new_tensor_also_of_an_outer_product(block, uses):
    """Blocks without a use for the factors get the product dense."""
    moments = block.observe(seen(uses), 0.7)
    damped = BlockDiagonalInverse().prepare(Curvature((moments,))).damped(GAMMA)
    factors = OuterProduct(normal(1, ROWS), normal(1, COLUMNS, seed=1))
    V = factors.to_dense()
    kept = V.clone()
    (found,) = damped.mv([V])
    assert_close(damped.mv([factors])[0], found, **ALGEBRA)
    found.zero_()
    assert torch.equal(V, kept)
    assert bool(damped.mv([V])[0].any())


@each_block
def test_without_curvature_and_damping_there_is_no_inverse(block, uses):
    given = seen(uses)
    for tap in given:
        tap.inputs.zero_()
        tap.grads.zero_()
    moments = block.observe(given, 0.7)
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(0.0, FactoredTikhonov("one"))
    damped = BlockDiagonalInverse(FactoredTikhonov("one")).prepare(Curvature((moments,)))
    assert [number for number, _ in damped.damped(0.0).failures] == [0]
    V = normal(ROWS, COLUMNS)
    assert bool(moments.damped(0.5, FactoredTikhonov()).mv(V).isfinite().all())


@each_block
def test_a_state_of_another_unit_is_refused(block, uses):
    moments = block.observe(seen(uses), 0.7)
    moments.check(Layout("unit", ROWS, COLUMNS, torch.float64))
    for rows, columns, dtype in [
        (ROWS, COLUMNS + 1, torch.float64),
        (ROWS + EACH, COLUMNS, torch.float64),
        (ROWS, COLUMNS, torch.float32),
    ]:
        with pytest.raises(StateError, match="unit"):
            moments.check(Layout("unit", rows, columns, dtype))


def test_one_group_without_an_inverse_is_named():
    use = grouped()
    use.inputs[1], use.grads[1] = 0, 0
    moments = GroupedKroneckerBlock().observe([use], 0.7)
    with pytest.raises(NotPositiveDefiniteError, match=r"A\[1\]"):
        moments.damped(0.0, FactoredTikhonov("one"))


def test_the_larger_product_may_be_either():
    """The order in which the two are decomposed does not change the matrix."""
    uses = [direct(), transposed()]
    for weight in (1e-6, 1e6):
        moments = tied().observe(uses, weight)
        smaller = KroneckerMoments(moments.transposed.A / weight**2, moments.transposed.G)
        pairs = [(m.A, m.G) for m in (moments.direct, smaller)]
        found = KroneckerSumMoments(moments.direct, smaller).damped(GAMMA, FactoredTikhonov())
        assert_relative(found.to_dense(), torch.linalg.inv(damped_sum(pairs, GAMMA)))


def test_lookups_are_counted_and_never_vocabulary_squared():
    vocabulary, width = 50_000, 8
    index = torch.randint(vocabulary, (EXAMPLES, 2))
    hot = OneHot(index, vocabulary, torch.float64)
    uses = [
        Tap(hot, normal(EXAMPLES, 2, width), transposed=True),
        Tap(normal(EXAMPLES, 2, width), normal(EXAMPLES, 2, vocabulary, seed=1)),
    ]
    moments = tied((False, True, False, True)).observe(uses, 0.7)
    counts = torch.bincount(index.flatten(), minlength=vocabulary).double() / index.numel()
    assert_close(moments.transposed.G, counts, **ALGEBRA)
    assert moments.direct.G.shape == (vocabulary,)
    V, row = normal(vocabulary, width), int(index[0, 0])
    U = moments.damped(GAMMA, FactoredTikhonov()).mv(V)
    pairs = [
        (m.A, m.G, (m.A.trace() / width, m.G.mean())) for m in (moments.direct, moments.transposed)
    ]
    share = GAMMA / sum(float(a * g) for _, _, (a, g) in pairs) ** 0.5
    matrix = sum(
        (A + share * a * torch.eye(width).double()) * (G[row] + share * g) for A, G, (a, g) in pairs
    )
    assert_close(U[row], torch.linalg.solve(matrix, V[row]), **ALGEBRA)


def test_a_change_of_block_starts_the_average_anew():
    """A unit that fell back to a diagonal block has no use for its Kronecker factors."""
    part = Part([normal(4, COLUMNS)], [normal(4, ROWS, seed=1)])
    old = Curvature((KroneckerMoments(spd(COLUMNS), spd(ROWS)),), examples=4.0)

    def found(block, old):
        sample = Sample([part], lambda part: part)
        return estimate_all(sample, [block], SampledFisher(), seeded(), old=old, decay=0.9)

    fresh = found(DiagonalBlock(), None).blocks[0]
    assert isinstance(fresh, DiagonalMoments)
    assert torch.equal(found(DiagonalBlock(), old).blocks[0].D, fresh.D)
    assert not torch.allclose(
        found(KroneckerBlock(), old).blocks[0].A, found(KroneckerBlock(), None).blocks[0].A
    )


def test_settings_are_checked():
    with pytest.raises(ValueError, match="sharing is one of"):
        KroneckerBlock("mean")

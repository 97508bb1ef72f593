"""A conformance kit for curvature blocks."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac.curvature import AnyTap, Block, FactoredTikhonov, GroupedTap, Moments, Tap
from kronfac.storage import pack, tensors_in, unpack

Way = Literal["direct", "transposed", "grouped"]
"""s = V ā; s = Vᵀ ā; rows in two groups, each with inputs of its own."""
GROUPS = 2


def _close(found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


def check_block(
    block: Block,
    rows: int = 4,
    columns: int = 3,
    places: int = 2,
    seed: int = 0,
    uses: Sequence[Way] = ("direct",),
) -> None:
    """Check what K-FAC relies on, for a unit of this shape that is used in these ways, in float64.

    - two passes with half of the examples each show what one pass with all of them does;
    - an example that comes twice with half the weight changes nothing;
    - the moving average is decay · old + (1 − decay) · new;
    - the damped inverse is symmetric and positive definite, multiplies as its dense form does, and becomes
      smaller with γ;
    - moments and operators come back from their saved form.

    Raises:
        AssertionError: it does not hold.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    taps = [_tap(way, normal, rows, columns, places) for way in uses]

    def observe(index: Tensor, weight: float = 0.125) -> Moments:
        return block.observe([_select(tap, index) for tap in taps], weight)

    whole = observe(torch.arange(8))
    halves = block.average(None, 0.0)
    for half in (torch.arange(4), torch.arange(4, 8)):
        halves.add([_select(tap, half) for tap in taps], 1.0, 0.125)
    for found, expected in zip(*map(tensors_in, (halves.value(), whole)), strict=True):
        _close(found, expected)
    twice = observe(torch.arange(8).repeat(2), weight=0.0625)
    _close(twice.dense(), whole.dense())
    assert whole.size == rows * columns
    _close(whole.trace(), whole.dense().trace())

    average = block.average(whole, 0.75)
    average.add([_select(tap, torch.arange(4)) for tap in taps], 1.0, 0.25)
    new = observe(torch.arange(4), weight=0.25)
    for found, a, b in zip(*map(tensors_in, (average.value(), whole, new)), strict=True):
        _close(found, 0.75 * a + 0.25 * b)

    V = normal(rows, columns)
    operators = [whole.damped(gamma, FactoredTikhonov()) for gamma in (0.3, 3.0)]
    for operator in operators:
        dense = operator.to_dense()
        _close(dense, dense.mT)
        assert float(torch.linalg.eigvalsh(dense)[0]) > 0
        _close(_vec(operator.mv(V)), dense @ _vec(V))
        assert torch.equal(_reload(operator).mv(V), operator.mv(V))
    difference = operators[0].to_dense() - operators[1].to_dense()
    assert float(torch.linalg.eigvalsh(difference)[0]) > 0
    assert torch.equal(_reload(whole).dense(), whole.dense())


def _tap(way: Way, normal: Any, rows: int, columns: int, places: int) -> AnyTap:
    """A use by 8 examples."""
    if way == "direct":
        return Tap(normal(8, places, columns), normal(8, places, rows))
    if way == "transposed":
        return Tap(normal(8, places, rows), normal(8, places, columns), transposed=True)
    return GroupedTap(normal(GROUPS, 8, places, columns), normal(GROUPS, 8, places, rows // GROUPS))


def _select(tap: AnyTap, index: Tensor) -> AnyTap:
    """The tap of some of the examples."""
    if isinstance(tap, GroupedTap):
        return GroupedTap(tap.inputs[:, index], tap.grads[:, index])
    assert isinstance(tap, Tap)
    assert isinstance(tap.inputs, Tensor)
    return Tap(tap.inputs[index], tap.grads[index], transposed=tap.transposed)


def _reload(value: Any) -> Any:
    """The value from its saved form."""
    return unpack(pack(value))


def _vec(V: Tensor) -> Tensor:
    """Columns under each other."""
    return V.mT.reshape(-1)

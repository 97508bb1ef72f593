"""A conformance kit for curvature blocks."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac.curvature import Block, FactoredTikhonov, Moments, Tap
from kronfac.storage import Unpacker, pack


def _close(found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


def check_block(
    block: Block, rows: int = 3, columns: int = 4, places: int = 2, seed: int = 0
) -> None:
    """Check what K-FAC relies on, for a unit of this shape, in float64.

    - moments of two halves of the examples add up to those of all;
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

    a, g = normal(8, places, columns), normal(8, places, rows)

    def observe(index: Tensor, share: float = 1.0, weight: float = 0.125) -> Moments:
        return block.observe([Tap(a[index], g[index])], share, weight)

    whole = observe(torch.arange(8))
    halves = [observe(torch.arange(4) + 4 * i, share=0.5) for i in range(2)]
    for name in _names(whole):
        _close(sum(getattr(half, name) for half in halves), getattr(whole, name))
    twice = observe(torch.arange(8).repeat(2), weight=0.0625)
    _close(twice.dense(), whole.dense())
    assert whole.size == rows * columns
    _close(whole.trace(), whole.dense().trace())

    average = block.average(whole, 0.75)
    average.add([Tap(a[:4], g[:4])], True, 1.0, 0.25)
    new = observe(torch.arange(4), weight=0.25)
    for name in _names(whole):
        expected = 0.75 * getattr(whole, name) + 0.25 * getattr(new, name)
        _close(getattr(average.value(), name), expected)

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


def _reload(value: Any) -> Any:
    """The value from its saved form."""
    return Unpacker(torch.device("cpu")).unpack(type(value), pack(value))


def _names(moments: Moments) -> list[str]:
    return [f.name for f in fields(moments)]  # type: ignore[arg-type]


def _vec(V: Tensor) -> Tensor:
    """Columns under each other."""
    return V.mT.reshape(-1)

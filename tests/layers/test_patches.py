"""A of convolutions against patches cut out by the convolution itself, at all places and at some."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import KroneckerBlock, Tap
from kronfac.model import find_units, record_uses
from kronfac.model.layers import convolution
from kronfac.testing import check_adapter
from tests.conftest import ALGEBRA, normal
from tests.layers.truth import weight_columns

N = 3
SPREAD = {
    "stride 1": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), padding=1), (N, 2, 4, 3)),
    "stride 2": (lambda: nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1), (N, 3, 3, 4)),
    "a stride for every dimension": (
        lambda: nn.ConvTranspose3d(2, 1, (3, 2, 4), stride=(1, 2, 3), padding=(1, 0, 2)),
        (N, 2, 2, 3, 3),
    ),
    "a stride larger than the kernel": (
        lambda: nn.ConvTranspose2d(2, 3, (2, 1), stride=(3, 2)),
        (N, 2, 3, 4),
    ),
    "output_padding": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=(3, 2), output_padding=(2, 1), bias=False),
        (N, 2, 3, 4),
    ),
    "dilation": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2, dilation=3), (N, 2, 5)),
    "dilation and stride with a divisor": (
        lambda: nn.ConvTranspose1d(2, 3, 5, stride=4, dilation=6, padding=3, output_padding=5),
        (N, 2, 5),
    ),
    "dilation by the stride": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=2, dilation=(2, 4), padding=(2, 1)),
        (N, 2, 4, 3),
    ),
    "outputs that no input reaches": (
        lambda: nn.ConvTranspose1d(2, 3, 2, stride=2, output_padding=2, dilation=3),
        (N, 2, 4),
    ),
    "much padding": (lambda: nn.ConvTranspose1d(2, 3, 5, stride=2, padding=4), (N, 2, 6)),
    "one place": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), (N, 2, 1, 1)),
}
PLAIN = {
    "1d": (lambda: nn.Conv1d(2, 3, 3, stride=2), (N, 2, 9)),
    "2d": (lambda: nn.Conv2d(3, 2, (3, 2), stride=(2, 1), dilation=(1, 2)), (N, 3, 8, 5)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, bias=False), (N, 2, 4, 3, 5)),
}
KINDS = {
    **{f"transposed, {name}": kind for name, kind in SPREAD.items()},
    **{f"convolution, {name}": kind for name, kind in PLAIN.items()},
}


def seen(module: nn.Module, x: torch.Tensor) -> Tap:
    """The one use of a convolution, with gradients that no test looks at."""
    units = find_units(module).units
    with record_uses([], units, len(x)) as found:
        z = module(x)
    (tap,) = found.uses.taps(0, [torch.ones_like(z)])
    assert isinstance(tap, Tap)
    return tap


def inputs(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """ā by its definition, (examples, places, columns)."""
    patches = weight_columns(module, x, len(x))
    return patches if module.bias is None else torch.cat([patches, 0 * patches[..., :1] + 1], -1)


def assert_A(tap: Tap, expected: torch.Tensor) -> None:
    """A is the mean second moment of these vectors (vectors, columns)."""
    assert_close(tap.input_rows(), expected, rtol=0, atol=0)
    A = expected.mT @ expected / len(expected)
    assert_close(KroneckerBlock().observe([tap], 1.0).A, A, **ALGEBRA)
    diagonal = KroneckerBlock(diagonal_inputs=True).observe([tap], 1.0).A
    assert_close(diagonal, A.diagonal(), **ALGEBRA)


@pytest.mark.parametrize("name", KINDS)
def test_a_is_estimated_from_all_places_from_some_or_from_those_that_count(name, monkeypatch):
    """Some: place j · 4 + n mod 4 of example n, row by row."""
    make, shape = KINDS[name]
    module, x = make().double(), normal(*shape)
    tap, every = seen(module, x), inputs(module, x)
    assert_close(tap.dense_inputs(), every, rtol=0, atol=0)
    assert_A(tap, every.flatten(0, 1))

    counts = normal(*every.shape[:2], seed=5) > 0
    counts[0, 0] = True
    assert_A(Tap(tap.inputs, tap.grads, counts), every[counts])

    monkeypatch.setattr(convolution, "LEAST_ROWS", 0)
    places = every.shape[1]
    step = min(4, places)
    some = [range(n % step, places // step * step, step) for n in range(len(x))]
    assert_A(tap, torch.cat([every[n, list(own)] for n, own in enumerate(some)]))


@pytest.mark.parametrize("name", SPREAD)
def test_gradients_of_every_example(name):
    make, shape = SPREAD[name]
    check_adapter(make(), normal(*shape))


@pytest.mark.parametrize("name", ["stride 2", "a stride larger than the kernel", "dilation"])
def test_transposed_convolutions_in_groups(name):
    make, (_, channels, *sizes) = SPREAD[name]
    one = make()
    module = type(one)(
        *(2 * channels, 4, one.kernel_size, one.stride, one.padding, one.output_padding, 2),
        dilation=one.dilation,
    )
    check_adapter(module, normal(N, 2 * channels, *sizes))

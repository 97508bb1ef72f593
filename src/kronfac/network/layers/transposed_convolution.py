"""Transposed convolutions: at every place of the output, the weight times the inputs that reach it.

An input at place i is spread over the places o = i · stride + k · dilation − padding, one for each tap k of
the kernel. Seen from an output, the weight, stored as (in, out / groups, kernel), is a matrix
(out, in / groups · kernel) that is multiplied with a patch: for tap k the input at i, or zero if no i has
that o. With a stride of 2 in two dimensions three quarters of a patch are such zeros. Which taps they are
depends on the phase (o + padding) mod stride alone, and outputs of one phase see a patch of the input
itself, with no zeros in between.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.curvature.scattered_rows import Group, ScatteredRows
from kronfac.network.adapter import Layer, register
from kronfac.network.blocks import Kind
from kronfac.network.by_example import Layout
from kronfac.network.functions import SeeFunctions, not_a_view, observes
from kronfac.network.layers.convolution import (
    Geometry,
    _by_group,
    _last,
    _tuple,
    coordinates,
    cut_out,
    sample_places,
)


@dataclass(frozen=True)
class Phase:
    """Output places with the same remainder (o + padding) mod stride, along one dimension.

    With o + padding = stride · q + remainder, they see the inputs from q + `first` on, `dilation` apart,
    the last of them by tap `taps[0]`.
    """

    remainder: int
    taps: tuple[int, ...]
    """The taps k that reach them: k · dilation mod stride is the remainder. Ascending."""
    first: int
    dilation: int


def _phases(kernel: int, stride: int, dilation: int) -> list[Phase]:
    """The phases along one dimension that any tap reaches."""
    found = []
    # Taps of one phase are stride / gcd apart, and so see inputs that are dilation / gcd apart.
    apart = dilation // math.gcd(stride, dilation)
    for remainder in range(stride):
        taps = tuple(k for k in range(kernel) if k * dilation % stride == remainder)
        if taps:
            found.append(Phase(remainder, taps, -(taps[-1] * dilation // stride), apart))
    return found


@dataclass(frozen=True)
class SpreadPatches:
    """What the weight of a transposed convolution is multiplied with, phase by phase."""

    x: Tensor  # the input, (examples, channels, …)
    spread: Geometry
    """How a place of the input is spread over the padded outputs."""
    padding: tuple[int, ...]
    sizes: torch.Size
    """Sizes of the outputs' places."""

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        columns = self.x.shape[1] * math.prod(self.spread.kernel)
        return torch.Size((len(self.x), self.sizes.numel(), columns))

    def all(self) -> Tensor:
        """All of them, (examples, places, columns)."""
        n = torch.arange(len(self.x), device=self.x.device).repeat_interleave(self.sizes.numel())
        place = torch.arange(self.sizes.numel(), device=self.x.device).repeat(len(self.x))
        return self._at(n, coordinates(place, self.sizes)).all().view(self.shape)

    def rows(self) -> ScatteredRows:
        """Some of them: see `sample_places`."""
        return self._at(*sample_places(len(self.x), self.sizes, self.x.device))

    def _at(self, n: Tensor, place: Sequence[Tensor]) -> ScatteredRows:
        """The patches of examples n at some places of the output."""
        geometry, channels = self.spread, self.x.shape[1]
        by_phase = [
            _phases(*of)
            for of in zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        ]
        # q of every place, and zeros on both sides for patches that reach beyond the input.
        moved = [o + p for o, p in zip(place, self.padding, strict=True)]
        q = [o // s for o, s in zip(moved, geometry.stride, strict=True)]
        remainders = [o % s for o, s in zip(moved, geometry.stride, strict=True)]
        before = [-min(phase.first for phase in phases) for phases in by_phase]
        last = [
            (o - 1 + p) // s
            for o, p, s in zip(self.sizes, self.padding, geometry.stride, strict=True)
        ]
        sides = [
            (b, max(end + 1 - length, 0))
            for b, end, length in zip(before, last, self.x.shape[2:], strict=True)
        ]
        padded = functional.pad(self.x, [side for pair in reversed(sides) for side in pair])
        numbers = torch.arange(channels * math.prod(geometry.kernel), device=n.device)
        by_tap = numbers.view(channels, *geometry.kernel).movedim(0, -1)  # (*kernel, channels)
        groups = []
        for phases in itertools.product(*by_phase):
            inside = torch.stack(
                [r == phase.remainder for r, phase in zip(remainders, phases, strict=True)]
            )
            (vectors,) = inside.all(dim=0).nonzero(as_tuple=True)
            corner = [
                c[vectors] + phase.first + b for c, phase, b in zip(q, phases, before, strict=True)
            ]
            kernel = tuple(len(phase.taps) for phase in phases)
            seen = Geometry(kernel, (1,) * len(kernel), tuple(phase.dilation for phase in phases))
            columns = by_tap
            for dim, phase in enumerate(phases):  # inputs ascend as taps descend
                taps = torch.tensor(phase.taps[::-1], device=n.device)
                columns = columns.index_select(dim, taps)
            values = cut_out(padded, n[vectors], corner, seen)
            groups.append(Group(values, columns.flatten(), vectors))
        return ScatteredRows(tuple(groups), len(numbers), len(n), self.x.new_empty(0))

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns).

        By the input's own places: Σ_p x_p times the patch of g that p was spread over. The input has fewer
        of them, and nothing is multiplied with the zeros in between.
        """
        rows = g.shape[-1]
        image = g.mT.unflatten(-1, self.sizes)
        padded = functional.pad(image, [p for p in reversed(self.padding) for _ in range(2)])
        windows = self.spread.windows(padded)
        for dim, length in enumerate(self.x.shape[2:], start=1):
            windows = windows.narrow(dim, 0, length)  # more of them with a large output_padding
        dims = len(self.padding)
        last = windows.permute(0, *range(1 + dims, windows.dim()), *range(1, 1 + dims))
        # (examples, rows · kernel, p)
        columns = last.reshape(len(g), -1, self.x.shape[2:].numel())
        product = self.x.flatten(2) @ columns.mT  # (examples, channels, rows · kernel)
        by_row: Tensor = product.unflatten(-1, (rows, -1)).transpose(1, 2)
        return by_row.reshape(len(g), rows, -1)

    def select(self, index: slice) -> "SpreadPatches":
        """The patches of some of the examples."""
        return replace(self, x=self.x[index])


def _observe(
    function: Callable[..., Tensor],
    dims: int,
    see: SeeFunctions,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    arguments = (stride, padding, output_padding, groups, dilation)
    outputs = not_a_view(function(input, weight, bias, *arguments))
    if (derived := see.derived(weight)) is not None:
        see.give_up(derived.roots, function, computed=True)
    own_weight, own_bias = see.parameter(weight), see.parameter(bias)
    if own_weight is None and own_bias is None:
        return outputs
    if own_weight is not None and not see.uses.swapped(own_weight):
        see.give_up([own_weight], function)
        own_weight = None
    batched = input if input.dim() == dims + 2 else input.unsqueeze(0)
    x = batched.detach().to(weight.dtype)
    spread = Geometry(tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims))
    patches = SpreadPatches(x, spread, _tuple(padding, dims), outputs.shape[-dims:])
    if groups == 1:
        factors = [(own_weight, patches), (own_bias, None)]
        see.uses.product(outputs, factors, Layout(partial(_last, dims=dims), dim=0), input)
        return outputs
    apart = replace(patches, x=x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1))
    columns = apart.all().unflatten(0, (groups, -1))
    arrange = partial(_by_group, groups=groups, dims=dims)
    see.uses.grouped(outputs, [(own_weight, columns), (own_bias, None)], arrange, input)
    return outputs


_FUNCTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
for _dims, _function in enumerate(_FUNCTIONS, start=1):
    observes(_function)(partial(_observe, _function, _dims))


class TransposedConvolutionAdapter(Layer):
    """A transposed convolution: small ones and those in groups have dense blocks."""

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        """By its groups."""
        return "convolution" if module.groups == 1 else "grouped"

    def swapped(self, module: nn.Module) -> int:
        """Its groups."""
        groups = module.groups
        assert isinstance(groups, int)
        return groups


for _type in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_type, TransposedConvolutionAdapter(), subclasses=True)

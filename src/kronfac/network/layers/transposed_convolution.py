"""Transposed convolutions: at every place of the output, a patch of the stretched input times the weight.

A transposed convolution is the convolution with stride 1 of its input, stretched by its stride with zeros
in between, with the kernel turned round. Seen that way its weight, stored as (in, out / groups, kernel), is
a matrix (out, in / groups · kernel) that is multiplied with patches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.network.adapter import Layer, register
from kronfac.network.blocks import Kind
from kronfac.network.by_example import Layout
from kronfac.network.functions import SeeFunctions, not_a_view, observes
from kronfac.network.layers.convolution import Geometry, Patches, _by_group, _last, _tuple


def _stretched(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    extra: tuple[int, ...],
) -> Tensor:
    """The input with zeros between its places and around it."""
    sizes = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, s) for s in stride))] = x
    sides = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    both = [side for s, e in reversed(list(zip(sides, extra, strict=True))) for side in (s, s + e)]
    return functional.pad(wide, both)  # negative sides cut off


def _turned(patches: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Patches (…, channels · kernel) with the kernel turned round."""
    dims = range(-len(kernel), 0)
    turned: Tensor = patches.unflatten(-1, (-1, *kernel)).flip(*dims).flatten(-len(kernel) - 1)
    return turned


@dataclass(frozen=True)
class TurnedPatches(Patches):
    """Patches of the stretched input with the kernel turned round."""

    source: Tensor  # the input, (examples, channels, …)
    spread: Geometry
    """How a place of the input is spread over the padded outputs."""
    padding: tuple[int, ...]
    outputs: torch.Size
    """Sizes of the outputs' places."""

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns).

        By the input's own places: Σ_p x_p times the patch of g that p was spread over. The input has fewer
        of them, and nothing is multiplied with the zeros in between.
        """
        rows = g.shape[-1]
        image = g.mT.unflatten(-1, self.outputs)
        padded = functional.pad(image, [p for p in reversed(self.padding) for _ in range(2)])
        windows = self.spread.windows(padded)
        for dim, length in enumerate(self.source.shape[2:], start=1):
            windows = windows.narrow(dim, 0, length)  # more of them with a large output_padding
        dims = len(self.padding)
        last = windows.permute(0, *range(1 + dims, windows.dim()), *range(1, 1 + dims))
        columns = last.reshape(
            len(g), -1, self.source.shape[2:].numel()
        )  # (examples, rows · kernel, p)
        product = self.source.flatten(2) @ columns.mT  # (examples, channels, rows · kernel)
        by_row: Tensor = product.unflatten(-1, (rows, -1)).transpose(1, 2)
        return by_row.reshape(len(g), rows, -1)

    def select(self, index: slice) -> "TurnedPatches":
        """The patches of some of the examples."""
        return replace(self, x=self.x[index], source=self.source[index])

    def all(self) -> Tensor:
        """All of them, (examples, places, columns)."""
        return _turned(super().all(), self.geometry.kernel)

    def rows(self) -> Tensor:
        """Some of them."""
        rows = super().rows()
        examples, places, _ = self.shape
        # `Patches.rows` asks `all` if there are few.
        few = self._step(examples, places) == 1
        return rows if few else _turned(rows, self.geometry.kernel)


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
    kernel = tuple(weight.shape[2:])
    given = (_tuple(a, dims) for a in (stride, padding, dilation, output_padding))
    batched = input if input.dim() == dims + 2 else input.unsqueeze(0)
    source = batched.detach().to(weight.dtype)
    x = _stretched(source, kernel, *given)
    geometry = Geometry(kernel, (1,) * dims, _tuple(dilation, dims))
    if groups == 1:
        spread = replace(geometry, stride=_tuple(stride, dims))
        sizes = outputs.shape[-dims:]
        patches = TurnedPatches(x, geometry, source, spread, _tuple(padding, dims), sizes)
        factors = [(own_weight, patches), (own_bias, None)]
        see.uses.product(outputs, factors, Layout(partial(_last, dims=dims), dim=0), input)
        return outputs
    apart = x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)
    columns = _turned(Patches(apart, geometry).all(), kernel).unflatten(0, (groups, -1))
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

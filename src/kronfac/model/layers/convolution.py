"""Convolutions: at every place, the weight as a matrix (out, in / groups · kernel) times a patch.

A is estimated from a sample of the places, G from all of them. A quarter of the patches estimates A as well
as all of them, and unfolding all of them would take many times the memory of the activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, not_a_view, observes
from kronfac.model.layout import Layout
from kronfac.model.registry import Layer, register

PLACES = 1 / 4
"""The share of places from which A is estimated."""
LEAST_ROWS = 2048
"""The least number of patches from which A is estimated, if there are as many."""


@dataclass(frozen=True)
class Patches:
    """The patches of padded images, copied when they are needed."""

    x: Tensor  # (images, channels, …), padded
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    reverse: bool = False
    """Whether inputs ascend while taps of the kernel descend, as in transposed convolutions."""
    frames: int = 1
    """The number of successive images in one example, such as the frames of a video."""
    constants: tuple[float, ...] = ()
    """Further columns that are constant over the places, such as the ones of a bias."""

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        sizes = self._sizes()
        columns = self.x.shape[1] * torch.Size(self.kernel).numel() + len(self.constants)
        examples = len(self.x) // self.frames
        return torch.Size((examples, self.frames * sizes.numel(), columns))

    def all(self) -> Tensor:
        return self._columns(self._windows()).reshape(self.shape)

    def rows(self) -> Tensor:
        """ā at some of the places, (vectors, columns): see `sample_places`."""
        places = sample_places(len(self.x), self._sizes(), self.x.device)
        return self._columns(self._windows()[places])

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns), for g (examples, places, rows)."""
        windows, dims = self._windows(), len(self.kernel)
        # With places last, patches are copied along the rows of the image, which is faster.
        order = (0, *range(1 + dims, windows.dim()), *range(1, 1 + dims))
        places = self._sizes().numel()
        patches = windows.permute(order).reshape(len(self.x), -1, places)
        each = g.reshape(len(self.x), places, g.shape[-1])
        found = self._in_order((each.mT @ patches.mT).unflatten(-1, (self.x.shape[1], -1)))
        found = found.unflatten(0, (-1, self.frames)).sum(dim=1)
        return torch.cat([found, *(c * g.sum(dim=1).unsqueeze(-1) for c in self.constants)], dim=-1)

    def select(self, index: slice) -> "Patches":
        """The patches of some of the examples."""
        start, stop, _ = index.indices(len(self.x) // self.frames)
        return replace(self, x=self.x[start * self.frames : stop * self.frames])

    def arranged(self, examples: int, constants: Sequence[float]) -> "Patches":
        """These images as those of `examples` examples, with further columns."""
        return replace(self, frames=len(self.x) // examples, constants=tuple(constants))

    def _sizes(self) -> torch.Size:
        """The number of places along every dimension."""
        sides = zip(self.x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return torch.Size((length - d * (k - 1) - 1) // s + 1 for length, k, s, d in sides)

    def _windows(self) -> Tensor:
        """A view (images, *places, channels, *kernel)."""
        first, channel, *inner = self.x.stride()
        steps = (a * s for a, s in zip(inner, self.stride, strict=True))
        taps = (a * d for a, d in zip(inner, self.dilation, strict=True))
        sizes = (len(self.x), *self._sizes(), self.x.shape[1], *self.kernel)
        strides = (first, *steps, channel, *taps)
        return self.x.as_strided(sizes, strides, self.x.storage_offset())

    def _columns(self, windows: Tensor) -> Tensor:
        """(…, columns) from windows (…, channels, *kernel)."""
        columns = self._in_order(windows.flatten(-len(self.kernel)))
        if not self.constants:
            return columns
        constants = columns.new_tensor(self.constants)
        return torch.cat([columns, constants.expand(*columns.shape[:-1], -1)], dim=-1)

    def _in_order(self, taps: Tensor) -> Tensor:
        """(…, channels · kernel) from (…, channels, kernel)."""
        return (taps.flip(-1) if self.reverse else taps).flatten(-2)


def sample_places(images: int, sizes: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Images and coordinates, (vectors,) each, of the places from which A is estimated.

    They are evenly spaced, with a shift from image to image, or all places if there are few. `sizes` are
    the numbers of places along every dimension.
    """
    places = sizes.numel()
    wanted = max(PLACES * places, min(LEAST_ROWS / images, places))
    step = min(max(int(places / wanted), 1), places)  # at least one place per image
    n = torch.arange(images, device=device)[:, None]
    place = (torch.arange(places // step, device=device) * step + n % step).flatten()
    return n.expand(-1, places // step).flatten(), *torch.unravel_index(place, sizes)


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _pad(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Images with zeros on both sides of every dimension."""
    if not any(map(any, sides)):
        return x
    return functional.pad(x, [side for pair in reversed(sides) for side in pair])


def _observe(
    function: Callable[..., Tensor],
    dims: int,
    see: SeeFunctions,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    outputs = not_a_view(function(input, weight, bias, stride, padding, dilation, groups))
    if not _concerns(see, function, weight, bias):
        return outputs
    kernel, dilation = tuple(weight.shape[2:]), _tuple(dilation, dims)
    if padding == "same":  # an odd padding has one more at the end
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _tuple(0 if padding == "valid" else padding, dims)]
    x = _pad(_batch(input, dims).to(weight.dtype), sides)
    patches = Patches(x, kernel, _tuple(stride, dims), dilation)
    _record(see, outputs, patches, weight, bias, groups)
    return outputs


def _observe_transposed(
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
    """An input at place i reaches the outputs o = i · stride + k · dilation − padding through tap k.

    So an output has a patch of the input, with zeros between its places, in which inputs ascend while taps
    descend.
    """
    arguments = (stride, padding, output_padding, groups, dilation)
    outputs = not_a_view(function(input, weight, bias, *arguments))
    known: Tensor | None = weight
    if see.parameter(weight) is not None and not see.uses.swapped(weight):
        see.give_up([weight], function)
        known = None
    if not _concerns(see, function, known, bias):
        return outputs
    kernel, dilation = tuple(weight.shape[2:]), _tuple(dilation, dims)
    steps, more = _tuple(stride, dims), _tuple(output_padding, dims)
    inputs = _batch(input, dims).to(weight.dtype)
    sizes = [(n - 1) * s + 1 for n, s in zip(inputs.shape[2:], steps, strict=True)]
    wide = inputs.new_zeros(*inputs.shape[:2], *sizes)
    places: Any = (..., *(slice(None, None, s) for s in steps))
    wide[places] = inputs
    sides = zip(kernel, dilation, _tuple(padding, dims), more, strict=True)
    x = _pad(wide, [(d * (k - 1) - p, d * (k - 1) - p + extra) for k, d, p, extra in sides])
    patches = Patches(x, kernel, (1,) * dims, dilation, reverse=True)
    _record(see, outputs, patches, known, bias, groups)
    return outputs


def _concerns(
    see: SeeFunctions,
    function: Callable[..., Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
) -> bool:
    """Whether there is a use to record; the parameters of a computed weight are given up."""
    if (derived := see.derived(weight)) is not None:
        see.give_up(derived.roots, function, computed=True)
    return see.parameter(weight) is not None or see.parameter(bias) is not None


def _batch(x: Tensor, dims: int) -> Tensor:
    """(images, channels, …) without a graph, from one image or several."""
    x = x.detach()
    return x if x.dim() == dims + 2 else x.unsqueeze(0)


def _record(
    see: SeeFunctions,
    outputs: Tensor,
    patches: Patches,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
) -> None:
    """Record a product with patches."""
    dims = len(patches.kernel)
    own_weight, own_bias = see.parameter(weight), see.parameter(bias)
    if groups == 1:
        layout = Layout(partial(_last, dims=dims), dim=0)
        see.uses.product(outputs, [(own_weight, patches), (own_bias, None)], layout)
        return
    # (images, groups · channels, …) → (groups, images, places, channels · kernel)
    apart = patches.x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)
    columns = replace(patches, x=apart).all().unflatten(0, (groups, -1))
    arrange = partial(_by_group, groups=groups, dims=dims)
    see.uses.grouped(outputs, [(own_weight, columns), (own_bias, None)], arrange)


def _last(g: Tensor, dims: int) -> Tensor:
    """(images, places, channels) from (images, channels, …)."""
    last: Tensor = _batch(g, dims).flatten(2).mT
    return last


def _by_group(g: Tensor, groups: int, dims: int) -> Tensor:
    """(groups, images, places, channels / groups) from (images, channels, …)."""
    grouped: Tensor = _last(g, dims).unflatten(-1, (groups, -1)).movedim(-2, 0)
    return grouped


_FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
for _dims in range(3):
    observes(_FUNCTIONS[_dims])(partial(_observe, _FUNCTIONS[_dims], _dims + 1))
    observes(_TRANSPOSED[_dims])(partial(_observe_transposed, _TRANSPOSED[_dims], _dims + 1))


class ConvolutionAdapter(Layer):
    """A convolution, with or without groups."""

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        return "convolution" if module.groups == 1 else "grouped"


class TransposedConvolutionAdapter(ConvolutionAdapter):
    """A transposed convolution, whose weight is stored as (in, out / groups, …)."""

    def swapped(self, module: nn.Module) -> int:
        groups = module.groups
        assert isinstance(groups, int)
        return groups


for _type in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_type, ConvolutionAdapter(), subclasses=True)
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_transposed, TransposedConvolutionAdapter(), subclasses=True)

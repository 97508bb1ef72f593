"""Convolutions: at every place the weight, as a matrix (out, in / groups · kernel), times a patch.

A is taken from a sample of the places, G from all of them. A quarter of the patches is as good for A as all
of them are, and to unfold them all would take many times the memory of the activations.
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
from kronfac.model.registry import Layer, register
from kronfac.model.uses import Layout

PLACES = 1 / 4
"""The share of places that A is taken from: as good as all of them."""
LEAST_ROWS = 2048
"""Patches that A is taken from at the least, if there are as many."""


@dataclass(frozen=True)
class Geometry:
    """How patches are cut out of an image."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def windows(self, x: Tensor) -> Tensor:
        """Patches of a padded input: a view (examples, *places, channels, *kernel)."""
        dims = len(self.kernel)
        sizes = [
            (length - d * (k - 1) - 1) // s + 1
            for length, k, s, d in zip(
                x.shape[2:], self.kernel, self.stride, self.dilation, strict=True
            )
        ]
        inner = x.stride()[2:]
        strides = [
            x.stride(0),
            *(a * s for a, s in zip(inner, self.stride, strict=True)),
            x.stride(1),
            *(a * d for a, d in zip(inner, self.dilation, strict=True)),
        ]
        assert len(sizes) == dims
        return x.as_strided((len(x), *sizes, x.shape[1], *self.kernel), strides, x.storage_offset())

    def columns(self, x: Tensor) -> Tensor:
        """Patches of a padded input, a copy (examples, channels · kernel, places)."""
        windows, dims = self.windows(x), len(self.kernel)
        places = windows.shape[1 : 1 + dims].numel()
        last = windows.permute(0, *range(1 + dims, windows.dim()), *range(1, 1 + dims))
        return last.reshape(len(x), -1, places)


@dataclass(frozen=True)
class Patches:
    """The patches of an input, cut out when they are asked for."""

    x: Tensor  # (examples, channels, …), padded
    geometry: Geometry
    reverse: bool = False
    """Whether inputs ascend as the taps of the kernel descend, as in transposed convolutions."""

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        windows = self.geometry.windows(self.x)
        dims = len(self.geometry.kernel)
        places = windows.shape[1 : 1 + dims].numel()
        return torch.Size((len(windows), places, windows.shape[1 + dims :].numel()))

    def all(self) -> Tensor:
        """All of them, (examples, places, columns)."""
        return self._by_tap(self.geometry.windows(self.x).reshape(self.shape))

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns).

        Patches with their places last are copied along the rows of the image, many numbers at a time.
        """
        return self._by_tap(g.mT @ self.geometry.columns(self.x).mT)

    def rows(self) -> Tensor:
        """Some of them, (vectors, columns): see `sample_places`."""
        examples = len(self.x)
        sizes = self.geometry.windows(self.x).shape[1 : 1 + len(self.geometry.kernel)]
        n, place = sample_places(examples, sizes, self.x.device)
        corner = [c * s for c, s in zip(place, self.geometry.stride, strict=True)]
        values = cut_out(self.x, n, corner, self.geometry)
        return self._by_tap(values.view(len(n), -1, self.x.shape[1]).mT.flatten(1))

    def _by_tap(self, columns: Tensor) -> Tensor:
        """(…, channels · kernel) in the order of the taps."""
        if not self.reverse:
            return columns
        by_channel: Tensor = columns.unflatten(-1, (self.x.shape[1], -1))
        return by_channel.flip(-1).flatten(-2)

    def select(self, index: slice) -> "Patches":
        """The patches of some of the examples."""
        return replace(self, x=self.x[index])


def sample_places(
    examples: int, sizes: torch.Size, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Examples and coordinates of the places that A is taken from, (vectors,) each; `sizes` of all of them.

    Evenly spaced, and shifted from example to example; all of them if there are few.
    """
    places = sizes.numel()
    wanted = max(PLACES * places, min(LEAST_ROWS / examples, places))
    step = min(max(int(places / wanted), 1), places)  # of few places, one
    n = torch.arange(examples, device=device)[:, None]
    place = (torch.arange(places // step, device=device) * step + n % step).flatten()
    return n.expand(-1, places // step).flatten(), coordinates(place, sizes)


def coordinates(place: Tensor, sizes: torch.Size) -> list[Tensor]:
    """Where places are that are counted row by row."""
    found: list[Tensor] = []
    for size in reversed(sizes):
        found.insert(0, place % size)
        place = place // size
    return found


def cut_out(x: Tensor, n: Tensor, corner: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """Patches of images x (examples, channels, …) that begin at some places, (vectors, kernel · channels).

    With all channels of a place together, so that it is copied at once.
    """
    images = x.movedim(1, -1)
    index, taps = n, n.new_zeros(1)
    shape = zip(images.shape[1:-1], corner, geometry.kernel, geometry.dilation, strict=True)
    for size, first, k, dilation in shape:
        index = index * size + first
        taps = (taps[:, None] * size + torch.arange(k, device=n.device) * dilation).flatten()
    chosen = (index[:, None] + taps).flatten()
    return images.flatten(0, -2).index_select(0, chosen).view(len(n), len(taps) * x.shape[1])


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _padded(x: Tensor, padding: str | int | Sequence[int], geometry: Geometry) -> Tensor:
    """The input with zeros around it."""
    dims = len(geometry.kernel)
    if padding == "valid":
        return x
    if isinstance(padding, str):  # "same": the odd one of them goes to the end
        total = [d * (k - 1) for d, k in zip(geometry.dilation, geometry.kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _tuple(padding, dims)]
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
    _give_up_derived(see, function, weight)
    if see.parameter(weight) is not None or see.parameter(bias) is not None:
        geometry = Geometry(tuple(weight.shape[2:]), _tuple(stride, dims), _tuple(dilation, dims))
        x = _padded(_batch(input, dims).to(weight.dtype), padding, geometry)
        _record(see, outputs, Patches(x, geometry), weight, bias, groups, input)
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
    arguments = (stride, padding, output_padding, groups, dilation)
    outputs = not_a_view(function(input, weight, bias, *arguments))
    _give_up_derived(see, function, weight)
    known: Tensor | None = weight
    if see.parameter(weight) is not None and not see.uses.swapped(weight):
        see.give_up([weight], function)
        known = None
    if see.parameter(known) is not None or see.parameter(bias) is not None:
        kernel = tuple(weight.shape[2:])
        spread = Geometry(kernel, _tuple(stride, dims), _tuple(dilation, dims))
        x = _batch(input, dims).to(weight.dtype)
        x = _spread(x, spread, _tuple(padding, dims), _tuple(output_padding, dims))
        patches = Patches(x, replace(spread, stride=(1,) * dims), reverse=True)
        _record(see, outputs, patches, known, bias, groups, input)
    return outputs


def _give_up_derived(see: SeeFunctions, function: Callable[..., Tensor], weight: Tensor) -> None:
    """Note that a weight is computed from parameters, if it is."""
    if (derived := see.derived(weight)) is not None:
        see.give_up(derived.roots, function, computed=True)


def _batch(x: Tensor, dims: int) -> Tensor:
    """(examples, channels, …) without a graph."""
    x = x.detach()
    return x if x.dim() == dims + 2 else x.unsqueeze(0)


def _spread(
    x: Tensor, spread: Geometry, padding: tuple[int, ...], output_padding: tuple[int, ...]
) -> Tensor:
    """The image whose patches a transposed convolution multiplies with its weight.

    An input at place i reaches the outputs o = i · stride + k · dilation − padding, by tap k. Seen from an
    output, that is a patch of the input with zeros between its places, in which inputs ascend as taps
    descend.
    """
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], spread.stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    strided = tuple(slice(None, None, s) for s in spread.stride)
    wide[(slice(None), slice(None), *strided)] = x
    reach = [d * (k - 1) for d, k in zip(spread.dilation, spread.kernel, strict=True)]
    sides = [
        (r - p, r - p + more) for r, p, more in zip(reach, padding, output_padding, strict=True)
    ]
    return functional.pad(wide, [side for pair in reversed(sides) for side in pair])


def _record(
    see: SeeFunctions,
    outputs: Tensor,
    patches: Patches,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    source: Tensor,
) -> None:
    """Record a product with patches."""
    dims = len(patches.geometry.kernel)
    own_weight, own_bias = see.parameter(weight), see.parameter(bias)
    if groups == 1:
        layout = Layout(partial(_last, dims=dims), dim=0)
        see.uses.product(outputs, [(own_weight, patches), (own_bias, None)], layout, source)
        return
    # (examples, groups · channels, …) → (groups, examples, places, channels · kernel)
    apart = patches.x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)
    columns = replace(patches, x=apart).all().unflatten(0, (groups, -1))
    arrange = partial(_by_group, groups=groups, dims=dims)
    see.uses.grouped(outputs, [(own_weight, columns), (own_bias, None)], arrange, source)


def _last(g: Tensor, dims: int) -> Tensor:
    """(examples, places, channels) from (examples, channels, …)."""
    g = g if g.dim() == dims + 2 else g.unsqueeze(0)
    last: Tensor = g.flatten(2).mT
    return last


def _by_group(g: Tensor, groups: int, dims: int) -> Tensor:
    """(groups, examples, places, channels / groups) from (examples, channels, …)."""
    grouped: Tensor = _last(g, dims).unflatten(-1, (groups, -1)).movedim(-2, 0)
    return grouped


_FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
for _dims in range(3):
    observes(_FUNCTIONS[_dims])(partial(_observe, _FUNCTIONS[_dims], _dims + 1))
    observes(_TRANSPOSED[_dims])(partial(_observe_transposed, _TRANSPOSED[_dims], _dims + 1))


class ConvolutionAdapter(Layer):
    """A convolution: small ones and those in groups have dense blocks."""

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        """By its groups."""
        return "convolution" if module.groups == 1 else "grouped"


class TransposedConvolutionAdapter(ConvolutionAdapter):
    """A transposed convolution, whose weight is stored as (in, out / groups, …)."""

    def swapped(self, module: nn.Module) -> int:
        """Its groups."""
        groups = module.groups
        assert isinstance(groups, int)
        return groups


for _type in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register(_type, ConvolutionAdapter(), subclasses=True)
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register(_transposed, TransposedConvolutionAdapter(), subclasses=True)

"""Elementwise functions φ between two layers, and products with their slopes φ′(s).

If torch has a kernel from v and φ(s) to φ′(s) ⊙ v, slopes are not stored: φ(s) is in memory as the next
layer's input, and a pass over memory is saved. If torch's kernel takes s, it computes φ′(s) once. All other
slopes come from a graph.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kronfac.linalg import take

ELEMENTWISE: frozenset[type[nn.Module]] = frozenset(
    {
        nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU,
        nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh,
    }
)  # fmt: skip
"""Exact types, because a subclass may compute something else."""

Kernel = Callable[[Tensor, Tensor], Tensor]
"""From v and a tensor, such as φ(s), to φ′(s) ⊙ v."""
_aten = torch.ops.aten


_BY_VALUE: dict[type[nn.Module], tuple[Kernel, Kernel]] = {
    nn.ReLU: (
        lambda v, value: _aten.threshold_backward(v, value, 0.0),
        lambda v, value: _aten.threshold_backward.grad_input(v, value, 0.0, grad_input=v),
    ),
    nn.Sigmoid: (
        _aten.sigmoid_backward,
        lambda v, value: _aten.sigmoid_backward.grad_input(v, value, grad_input=v),
    ),
    nn.Tanh: (
        _aten.tanh_backward,
        lambda v, value: _aten.tanh_backward.grad_input(v, value, grad_input=v),
    ),
}
"""Kernels that take φ(s): one that returns a new tensor, and one that writes into v."""
_BY_SLOPE: tuple[Kernel, Kernel] = (torch.mul, Tensor.mul_)
_BY_ARGUMENT: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    nn.GELU: lambda f, ones, s: _aten.gelu_backward(ones, s, approximate=f.approximate),
    nn.SiLU: lambda f, ones, s: _aten.silu_backward(ones, s),
}
"""Kernels that take s; with v = 1 they return φ′(s)."""


@dataclass(frozen=True)
class Slope:
    """Multiplies with φ′(s)."""

    tensor: Tensor
    """φ(s) or φ′(s), (rows, out)."""
    kernels: tuple[Kernel, Kernel] = _BY_SLOPE

    def times(self, v: Tensor) -> Tensor:
        """φ′(s) ⊙ v, for v (…, rows, out)."""
        return self.kernels[0](v, self.tensor)

    def times_(self, v: Tensor) -> Tensor:
        """φ′(s) ⊙ v, written into v."""
        return self.kernels[1](v, self.tensor)

    def select(self, index: Tensor | slice) -> "Slope":
        """The slopes of some of the examples: a view for a slice."""
        return Slope(take(self.tensor, index), self.kernels)


Applied = Slope | tuple[Tensor, Tensor] | None
"""The slope after a layer, or s and φ(s) with a graph to compute it from; None without a function."""


def apply(functions: Sequence[nn.Module], s: Tensor) -> tuple[Tensor, Applied]:
    """φ(s), and the slope or the graph to compute it from."""
    if not functions:
        return s, None
    if len(functions) == 1 and (kernels := _BY_VALUE.get(type(functions[0]))):
        value = functions[0](s)
        return value, Slope(value, kernels)
    if len(functions) == 1 and (slope := _BY_ARGUMENT.get(type(functions[0]))):
        return functions[0](s), Slope(slope(functions[0], torch.ones_like(s), s))
    s.requires_grad_()
    with torch.enable_grad():
        value = s
        for function in functions:
            value = function(value)
    return value.detach(), (s, value)


def slopes(found: Sequence[Applied]) -> list[Slope | None]:
    """The slopes; those that have a graph by one backward pass from ones."""
    graphs = [pair for pair in found if isinstance(pair, tuple)]
    taken: Iterator[Tensor] = iter(())
    if graphs:
        s, values = zip(*graphs, strict=True)
        # Each in the memory of one number.
        ones = [value.new_ones(()).expand_as(value) for value in values]
        taken = iter(torch.autograd.grad(values, s, ones))
    return [Slope(next(taken)) if isinstance(item, tuple) else item for item in found]

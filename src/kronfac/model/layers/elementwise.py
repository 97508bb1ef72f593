"""Parameters in elementwise sums and products: scales, positions, PReLU."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.blocks import Kind
from kronfac.model.functions import Function, SeeFunctions, observes
from kronfac.model.registry import Layer, register


def _of_parameters(see: SeeFunctions, value: Any) -> bool:
    return see.parameter(value) is not None or see.derived(value) is not None


def _binary(
    function: Function, see: SeeFunctions, a: Any, b: Any, *args: Any, **kwargs: Any
) -> Any:
    """A function of two operands, of which one may be a parameter."""
    # Before the call, which may write to its operands.
    left, right = _of_parameters(see, a), _of_parameters(see, b)
    other = b if left else a
    kept = other.detach().clone() if _writes(function) and isinstance(other, Tensor) else other
    outputs = function(a, b, *args, **kwargs)
    if not (left or right):
        return outputs
    plain = not args and not kwargs and isinstance(outputs, Tensor)
    if (left and right) or not isinstance(other, Tensor) or not plain:
        see.follow(function, (a, b), {}, outputs)
        return outputs
    value = a if left else b
    x, known = _factor(function, kept, value, left)
    if not known:
        see.follow(function, (a, b), {}, outputs)
        return outputs
    wide = None if x is None else x.expand(outputs.shape)
    see.elementwise(outputs, (value, wide, value.shape))
    return outputs


def _factor(
    function: Function, other: Tensor, value: Tensor, left: bool
) -> tuple[Tensor | None, bool]:
    """∂ outputs / ∂ value, elementwise, None for ones; and whether it is known."""
    if function in _ADD:
        return None, True
    if function in _SUBTRACT:
        return (None if left else other.new_full((), -1.0).expand(other.shape)), True
    if function in _MULTIPLY:
        return other, True
    return (other.reciprocal(), True) if left else (None, False)  # divide


def _writes(function: Function) -> bool:
    return function.__name__.endswith("_") and not function.__name__.endswith("__")


_ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_SUBTRACT = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
_MULTIPLY = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_DIVIDE = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__}


def _register_binary(function: Function) -> None:
    def observer(see: SeeFunctions, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2:
            result = function(*args, **kwargs)
            see.follow(function, args, kwargs, result)
            return result
        return _binary(function, see, *args, **kwargs)

    observes(function)(observer)


_BINARY: Any = (*_ADD, *_SUBTRACT, *_MULTIPLY, *_DIVIDE)
for _function in _BINARY:
    _register_binary(_function)


@observes(Tensor.expand)
def _expand(see: SeeFunctions, value: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """A parameter that is expanded to all examples, such as a class token."""
    outputs = Tensor.expand(value, *sizes, **kwargs)
    n = see.uses.examples
    if (
        _of_parameters(see, value)
        and outputs.dim()
        and len(outputs) == n
        and value.shape[:1] != (n,)
    ):
        see.elementwise(outputs, (value, None, value.shape))
    else:
        see.follow(Tensor.expand, (value,), {}, outputs)
    return outputs


@observes(torch.prelu, functional.prelu)
def _prelu(see: SeeFunctions, input: Tensor, weight: Tensor) -> Tensor:
    """x for x > 0, else w x."""
    outputs = torch.prelu(input, weight)
    shape = [1] if weight.numel() == 1 else [-1] + [1] * (input.dim() - 2)
    below = input.detach().clamp(max=0)
    see.elementwise(outputs, (weight, below, weight.view(shape).shape))
    return outputs


class PReLUAdapter(Layer):
    """The slope for negative inputs: one number, or one per channel."""

    kind: ClassVar[Kind] = "elementwise"

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """The weight."""
        return [("weight",)]


register(nn.PReLU, PReLUAdapter(), subclasses=True)

"""nn.Linear, F.linear and products of matrices: s = W a + b, with any number of dimensions in front."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from kronfac.model.functions import Function, SeeFunctions, not_a_view, observes
from kronfac.model.layout import Layout
from kronfac.model.registry import Layer, register, register_name


class LinearAdapter(Layer):
    """The weight is multiplied with the module's input, the bias with ones."""


@observes(functional.linear)
def _linear(see: SeeFunctions, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    outputs = not_a_view(functional.linear(input, weight, bias))
    _record(see, outputs, input, weight, bias, functional.linear)
    return outputs


def _record(
    see: SeeFunctions,
    outputs: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    func: Any,
) -> None:
    """outputs = x Wᵀ + b."""
    plain = bias is None or (bias.dim() == 1 and see.derived(bias) is None)
    factors = [(see.parameter(weight), x), (see.parameter(bias) if plain else None, None)]
    if see.uses.swapped(weight):
        see.give_up([weight], func)
    else:
        see.uses.product(outputs, factors)
    if (derived := see.derived(weight)) is not None:
        see.give_up(derived.roots, func, computed=True)
    if bias is not None and not plain:
        see.elementwise(outputs, (bias, None, bias.shape))


def _matmul(function: Function, see: SeeFunctions, *args: Any, **kwargs: Any) -> Tensor:
    outputs: Tensor = function(*args, **kwargs)
    # Keyword arguments: the first is input or self, the second other, mat2 or tensor2.
    a, b, *_ = (*args, *(kwargs[name] for name in _OPERANDS if name in kwargs))
    if function is Tensor.__rmatmul__:
        a, b = b, a
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _record_matmul(see, outputs, a, b)
    return outputs


_OPERANDS = ("input", "self", "other", "mat2", "tensor2")
_PRODUCTS: Any = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    Tensor.mm,
    Tensor.__rmatmul__,
)
for _function in _PRODUCTS:
    observes(_function)(partial(_matmul, _function))


def _record_matmul(see: SeeFunctions, outputs: Tensor, a: Tensor, b: Tensor) -> None:
    """outputs = a b, one of which may be a parameter or its transpose."""
    on_left = see.parameter(a) is not None or see.derived(a) is not None
    on_right = see.parameter(b) is not None or see.derived(b) is not None
    if on_left == on_right:
        see.follow(torch.matmul, (a, b), {}, outputs)
        return
    weight, x = (a, b) if on_left else (b, a)
    derived = see.derived(weight)
    if weight.dim() != 2 or x.dim() < 2 or (derived is not None and not derived.transposed):
        see.follow(torch.matmul, (a, b), {}, outputs)
        return
    root = weight if derived is None else derived.roots[0]
    if on_left and derived is None:  # W x, one column per place
        see.uses.product(outputs, [(root, x.mT)], Layout(lambda g: g.mT))
    elif on_left:
        see.give_up([root], torch.matmul)
    elif derived is None:  # x W: each place has Wᵀ x
        see.uses.transposed(outputs, root, x)
    else:  # x Wᵀ
        see.uses.product(outputs, [(root, x)])


@observes(torch.addmm, Tensor.addmm)
def _addmm(
    see: SeeFunctions,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    outputs = torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    if beta != 1 or alpha != 1:
        see.follow(torch.addmm, (input, mat1, mat2), {}, outputs)
        return outputs
    derived = see.derived(mat2)
    if derived is not None and derived.transposed:
        _record(see, outputs, mat1, derived.roots[0], input, torch.addmm)
    elif (weight := see.parameter(mat2)) is not None:
        # W is stored as (in, out): a unit with swapped weights has [Wᵀ b], another unit Wᵀ without b.
        if see.uses.swapped(weight):
            see.uses.product(outputs, [(weight, mat1), (see.parameter(input), None)])
        else:
            see.uses.transposed(outputs, weight, mat1)
            see.elementwise(outputs, (input, None, input.shape))
    else:
        see.follow(torch.addmm, (input, mat1, mat2), {}, outputs)
    return outputs


class TransposedLinearAdapter(Layer):
    """A weight that is stored as (in, out), as Hugging Face's `Conv1D` has it."""

    def swapped(self, module: nn.Module) -> int:
        """One group."""
        return 1


register(nn.Linear, LinearAdapter())
register(NonDynamicallyQuantizableLinear, LinearAdapter())
register_name("transformers.pytorch_utils.Conv1D", TransposedLinearAdapter())

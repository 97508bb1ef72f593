"""Normalisation layers: scale and shift of numbers that have been normalised, s = w ⊙ x̂ + b.

Scale and shift are two columns of one matrix V (features, 2), with a dense block over the gradients of
single examples: it reaches nearly all that any block can, where a diagonal reaches half or less.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, observes
from kronfac.model.registry import Layer, register


def _affine(
    see: SeeFunctions, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """w ⊙ x + b with both broadcast from `shape`."""
    outputs = x
    if weight is not None:
        outputs = outputs * weight.view(*shape)
    if bias is not None:
        outputs = outputs + bias.view(*shape)
    see.elementwise(outputs, (weight, x, shape), (bias, None, shape))
    return outputs


def _channels(x: Tensor) -> list[int]:
    return [-1] + [1] * (x.dim() - 2)


def _shape(x: Tensor, p: Tensor | None) -> list[int]:
    return _channels(x) if p is None else [p.numel()] + [1] * (x.dim() - 2)


@observes(functional.layer_norm)
def _layer_norm(
    see: SeeFunctions,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x = functional.layer_norm(input, normalized_shape, None, None, eps)
    return _affine(see, x, weight, bias, normalized_shape)


@observes(functional.rms_norm)
def _rms_norm(
    see: SeeFunctions,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    x = functional.rms_norm(input, normalized_shape, None, eps)
    return _affine(see, x, weight, None, normalized_shape)


@observes(functional.group_norm)
def _group_norm(
    see: SeeFunctions,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x = functional.group_norm(input, num_groups, None, None, eps)
    return _affine(see, x, weight, bias, _shape(x, weight if bias is None else bias))


@observes(functional.batch_norm)
def _batch_norm(
    see: SeeFunctions,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    x = functional.batch_norm(input, running_mean, running_var, None, None, training, momentum, eps)
    return _affine(see, x, weight, bias, _shape(x, weight if bias is None else bias))


@observes(functional.instance_norm)
def _instance_norm(
    see: SeeFunctions,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    x = functional.instance_norm(
        input, running_mean, running_var, None, None, use_input_stats, momentum, eps
    )
    return _affine(see, x, weight, bias, _shape(x, weight if bias is None else bias))


class NormalizationAdapter(Layer):
    """Scale and shift, as two columns."""

    kind: ClassVar[Kind] = "elementwise"


_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm)
for _type in _TYPES:
    register(_type, NormalizationAdapter(), subclasses=True)

"""Normalisation layers: scale and shift of the normalised inputs, s = w ⊙ x̂ + b.

Scale and shift are two columns of one matrix V (features, 2) with a dense block. It reaches nearly all of
the best possible decrease, a diagonal block half of it or less.
"""

import inspect
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kronfac.model.blocks import Kind
from kronfac.model.functions import Function, SeeFunctions, observes
from kronfac.model.registry import Layer, register


def _normalize(
    function: Function, signature: inspect.Signature, see: SeeFunctions, *args: Any, **kwargs: Any
) -> Tensor:
    """Call the function without its parameters, then compute w ⊙ x̂ + b."""
    given = signature.bind(*args, **kwargs).arguments
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    x = function(**given)
    first = weight if bias is None else bias
    channels = [-1 if first is None else first.numel()] + [1] * (x.dim() - 2)
    shape = given.get("normalized_shape", channels)
    outputs: Tensor = x
    if weight is not None:
        outputs = outputs * weight.view(*shape)
    if bias is not None:
        outputs = outputs + bias.view(*shape)
    see.elementwise(outputs, (weight, x, shape), (bias, None, shape))
    return outputs


for _function in (
    functional.layer_norm,
    functional.rms_norm,
    functional.group_norm,
    functional.batch_norm,
    functional.instance_norm,
):
    _signature: inspect.Signature = inspect.signature(_function)
    observes(_function)(partial(_normalize, _function, _signature))


class NormalizationAdapter(Layer):
    """Treats scale and shift of a normalisation layer as the two columns of one matrix V."""

    kind: ClassVar[Kind] = "elementwise"


for _type in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm):
    register(_type, NormalizationAdapter(), subclasses=True)

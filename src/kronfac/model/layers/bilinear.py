"""nn.Bilinear: s_k = x₁ᵀ W_k x₂ + b_k, a product of V (out, in₁ · in₂) with x₁ ⊗ x₂."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.functions import SeeFunctions, observes
from kronfac.model.registry import Layer, register


@observes(torch.bilinear, functional.bilinear)
def _bilinear(
    see: SeeFunctions, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    outputs = torch.bilinear(input1, input2, weight, bias)
    see.give_up_inputs(torch.bilinear, input1, input2)
    if see.parameter(weight) is None and see.derived(weight) is None:
        x = input1  # only the bias has a use, and it ignores x
    else:
        x = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    see.product(outputs, weight, x, bias, torch.bilinear)
    return outputs


class BilinearAdapter(Layer):
    """Weight (out, in₁, in₂) and bias."""


register(nn.Bilinear, BilinearAdapter(), subclasses=True)

"""nn.Linear: s = W a + b = [W b] [a; 1]."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import UnsupportedModelError
from kronfac.layers.base import Layer


class LinearLayer(Layer):
    """A Linear on (batch, features); the bias is the last column of its matrix [MG15 §2.1]."""

    module: nn.Linear

    def __init__(self, name: str, module: nn.Linear) -> None:
        super().__init__(name, module)
        self.has_bias = module.bias is not None

    def parameter_names(self) -> list[str]:
        prefix = f"{self.name}." if self.name else ""
        return [prefix + "weight"] + ([prefix + "bias"] if self.has_bias else [])

    def parameters(self) -> list[nn.Parameter]:
        # Not `module.parameters()`, whose search costs small networks a few per cent of a step, and whose
        # order is that of registration: where pruning was removed, the bias comes first.
        own = self.module._parameters
        return [p for p in (own["weight"], own["bias"]) if p is not None]

    def inputs(self, x: Tensor) -> Tensor:
        x = self._vectors(x, "inputs")
        if self.has_bias:
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        return x.unsqueeze(1)

    def output_grads(self, g: Tensor) -> Tensor:
        return self._vectors(g, "outputs").unsqueeze(1)

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        weight, *bias = tensors
        return torch.cat([weight, bias[0].unsqueeze(1)], dim=1) if bias else weight

    def split(self, V: Tensor) -> list[Tensor]:
        return [V[:, :-1], V[:, -1]] if self.has_bias else [V]

    def tangents(self, x: Tensor, directions: Sequence[Tensor]) -> Tensor:
        x = self._vectors(x, "inputs")
        products = x.new_empty(len(directions), len(x), self.module.out_features)
        for product, V in zip(products, directions, strict=True):
            weight, *bias = self.split(V)
            if bias:
                torch.addmm(bias[0], x, weight.mT, out=product)
            else:
                torch.mm(x, weight.mT, out=product)
        return products

    def gradients(self, x: Tensor, g: Tensor) -> list[Tensor]:
        return [g.mT @ x, g.sum(dim=0)] if self.has_bias else [g.mT @ x]

    def weight_transposed(self) -> Tensor:
        return self.module.weight.detach().mT

    def module_forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.module.weight, self.module.bias)

    def known_output(self, x: Tensor, s: Tensor) -> Tensor:
        known: Tensor = _KnownOutput.apply(x, self.module.weight, s)  # type: ignore[no-untyped-call]
        return known

    @property
    def shape(self) -> tuple[int, int]:
        return self.module.out_features, self.module.in_features + self.has_bias

    def _vectors(self, x: Tensor, what: str) -> Tensor:
        if x.dim() != 2:
            raise UnsupportedModelError(
                f"KFAC needs every Linear to be called with a batch of vectors; the {what} of layer "
                f"{self.name!r} have shape {tuple(x.shape)}. Weight sharing is not supported yet: "
                "flatten the extra dimensions into the features."
            )
        return x


class _KnownOutput(torch.autograd.Function):
    """x ↦ W x + b with the result given; only the gradient with respect to x is ever asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return s.clone()  # an activation may overwrite it

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return (g @ weight if ctx.needs_input_grad[0] else None), None, None

"""What K-FAC asks of a layer: its inputs, its output gradients, its parameters as one matrix.

Layout: `[batch, shared, features]`. `shared` counts the places at which one case uses the same
weights; it is 1 for a Linear on a batch of vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Matrices = tuple[Tensor, ...]
"""A vector in parameter space, one matrix V (out, in+1) a layer: gradients, updates, directions."""


def dot(u: Matrices, v: Matrices) -> Tensor:
    """uᵀv, summed over the layers in float64."""
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in zip(u, v, strict=True)]
    return torch.stack(parts).sum()


class Layer(ABC):
    """An adaptor around one module whose parameters form W with s = W ā."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """`name` is the module's path in the model, used in errors and in saved states."""
        self.name = name
        self.module = module

    @abstractmethod
    def parameter_names(self) -> list[str]:
        """Full names in the model, in the order of `split`."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of `split`."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Tensor:
        """ā (batch, shared, in+1), with the homogeneous coordinate where there is a bias."""

    @abstractmethod
    def output_grads(self, g: Tensor) -> Tensor:
        """g (batch, shared, out) from the gradient with respect to the module's output."""

    @abstractmethod
    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """V (out, in+1) from tensors shaped like the parameters."""

    @abstractmethod
    def split(self, V: Tensor) -> list[Tensor]:
        """Tensors shaped like the parameters from V, views where possible."""

    @abstractmethod
    def tangents(self, x: Tensor, directions: Sequence[Tensor]) -> Tensor:
        """V ā for every direction V, (k, rows, out), a new tensor."""

    @abstractmethod
    def gradients(self, x: Tensor, g: Tensor) -> list[Tensor]:
        """Of the parameters, new tensors, from the module's inputs and gradients at its outputs."""

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        """The same as V (out, in+1): Σ g āᵀ over the rows."""
        return self.join(self.gradients(x, g))

    @abstractmethod
    def weight_transposed(self) -> Tensor:
        """W without the bias, (in, out): what multiplies the rows of an input's tangent."""

    @abstractmethod
    def module_forward(self, x: Tensor) -> Tensor:
        """The module's output by its class's own forward function, also while that is replaced."""

    @abstractmethod
    def known_output(self, x: Tensor, s: Tensor) -> Tensor:
        """s, which the layer is known to return for x, in the autograd graph as if computed from x."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in+1)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.parameters()[0].dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, shape={self.shape})"

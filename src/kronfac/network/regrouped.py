"""Inputs of a use by other examples than the module was called with.

Frames of a video, crops of an image and two views of every example go through a convolution as examples of
their own, (examples · k, …): to the network they are further places of one example.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.curvature import Inputs
from kronfac.curvature.taps import Rows


@dataclass(frozen=True)
class Regrouped:
    """(examples, k · places, columns) of inputs (examples · k, places, columns), k after one another."""

    inputs: Inputs
    examples: int

    @property
    def _each(self) -> int:
        """k."""
        return self.inputs.shape[0] // self.examples

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        _, places, columns = self.inputs.shape
        return torch.Size((self.examples, self._each * places, columns))

    def all(self) -> Tensor:
        """ā."""
        return self.inputs.all().reshape(self.shape)

    def rows(self) -> Rows:
        """The same vectors, whoever they belong to."""
        return self.inputs.rows()

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example."""
        apart = g.reshape(*self.inputs.shape[:2], g.shape[-1])
        each: Tensor = self.inputs.gradients(apart).unflatten(0, (self.examples, self._each))
        return each.sum(dim=1)

    def select(self, index: slice) -> "Regrouped":
        """The inputs of some of the examples."""
        start, stop, _ = index.indices(self.examples)
        some = self.inputs.select(slice(start * self._each, stop * self._each))
        return Regrouped(some, stop - start)


@dataclass(frozen=True)
class Views:
    """(examples, k · places, columns) of k views of all examples after one another."""

    inputs: tuple[Inputs, ...]
    """Those of every view, (examples, places, columns)."""

    @classmethod
    def of(cls, inputs: Inputs, examples: int) -> "Views":
        """From the inputs of all views after one another."""
        starts = range(0, inputs.shape[0], examples)
        return cls(tuple(inputs.select(slice(n, n + examples)) for n in starts))

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        examples, places, columns = self.inputs[0].shape
        return torch.Size((examples, len(self.inputs) * places, columns))

    def all(self) -> Tensor:
        """ā."""
        return torch.cat([view.all() for view in self.inputs], dim=1)

    def rows(self) -> Rows:
        """Those of all views."""
        rows = [view.rows() for view in self.inputs]
        return torch.cat([part if isinstance(part, Tensor) else part.all() for part in rows])

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example."""
        parts = zip(self.inputs, g.chunk(len(self.inputs), dim=1), strict=True)
        return torch.stack([view.gradients(part) for view, part in parts]).sum(dim=0)

    def select(self, index: slice) -> "Views":
        """The inputs of some of the examples."""
        return Views(tuple(view.select(index) for view in self.inputs))

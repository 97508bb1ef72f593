"""The network around θ on one micro-batch: outputs f, J v and Jᵀ r.

Everything that a step asks of the network's derivatives goes through here. Layouts: outputs z of every loss
call are (terms, event), J v of k directions (k, terms, event), vectors r like the outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kronfac.curvature import Taps
from kronfac.network import Matrices, Pass


class Linearization(ABC):
    """f, J v and Jᵀ r of one micro-batch."""

    def __init__(self, part: Pass) -> None:
        self.part = part

    @property
    @abstractmethod
    def outputs(self) -> Sequence[Tensor]:
        """z of every loss call, without a graph."""

    @property
    @abstractmethod
    def summed(self) -> bool:
        """Whether some units show their gradient summed over the examples, and no more."""

    @abstractmethod
    def taps(self, vectors: Sequence[Tensor | None]) -> Sequence[Taps]:
        """What every unit shows for rᵀf: ā and g of every use, or only Jᵀ r; None is a zero r."""

    @abstractmethod
    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        """J v of every loss call, for all directions."""

    @abstractmethod
    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        """Jᵀ r, summed over the examples."""

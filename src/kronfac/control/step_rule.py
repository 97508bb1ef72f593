"""The interface of a rule for the step, (α, μ) [MG15 §6.4, §7]."""

from abc import abstractmethod
from dataclasses import dataclass, field

from kronfac.control.base import Measurement, ParameterVector, Rule
from kronfac.control.geodesic_steps import GeodesicSteps
from kronfac.control.long_memory import LongMemory, MemoryState
from kronfac.control.quadratic_form import Coefficients, Matrix
from kronfac.storage import Storable


@dataclass(frozen=True)
class Step:
    """Coefficients of the directions and what the model says of the step."""

    coefficients: tuple[float, ...]
    predicted_change: float
    """M(δ) − M(0)."""
    slope: float | None = None
    """∇hᵀδ; None along the directions of a minimiser, where it is twice the change."""
    remembered: float = 1.0
    """Share of the part along Δ that enters the momentum buffer."""


@dataclass(frozen=True)
class StepState(Storable):
    """The momentum buffer, and a memory of the rule's own."""

    momentum: ParameterVector | None = None
    """δ₀; None before the first step."""
    memory: MemoryState = field(default_factory=MemoryState)


class StepRule(Rule[StepState]):
    """How the coefficients of the directions are chosen [MG15 §6.4, §7]."""

    momentum: bool = False
    """Whether the momentum buffer is one of the directions."""
    bounded: bool = False
    """Whether a step that promises more than the whole objective is cut, see `clip_to_objective`."""
    cg_steps: int = 1
    """Steps of conjugate gradients on M, this one included."""

    @property
    def long_memory(self) -> LongMemory | None:
        """What momentum remembers while mini-batches are noisy; None for the last step as ever."""
        return None

    @property
    def geodesic_steps(self) -> GeodesicSteps | None:
        """When M is minimised over all directions; None for never."""
        return None

    def init(self, m: Measurement) -> StepState:
        """No momentum yet."""
        return StepState()

    @abstractmethod
    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        """The step, from Q (k, k) and r (k,), for one direction or two."""

"""How often each part of a K-FAC step is done, and on how many cases [MG15 §8]."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from kronfac import KFAC, Gaussian, presets
from kronfac.control import AdaptiveGamma
from kronfac.control.long_memory import COMPARING
from kronfac.settings import LEAST_ROWS, LONGEST_INTERVAL, Settings

Preset = Literal["paper", "default"]


def arguments(preset: Preset) -> dict[str, Any]:
    """For `KFAC`."""
    return presets.paper() if preset == "paper" else {}


@dataclass(frozen=True)
class Schedule:
    """Shares of the mini-batch and iterations from one time to the next."""

    tau1: float
    """τ₁, share of the statistics."""
    tau2: float
    """τ₂, share of the Fisher products."""
    T1: float
    """From one ρ to the next; infinite without."""
    T2: float
    """From one search for γ to the next; infinite without."""
    T3: float
    """From one refresh of the inverse to the next."""
    directions: int
    """In the Fisher products: Δ, and δ₀ with momentum."""
    extra: int
    """Further candidates at a search for γ."""
    comparison: float = math.inf
    """From one comparison of θ̄ with θ to the next, at the least; infinite without a long memory."""

    @classmethod
    def of(cls, settings: Settings, cases: int) -> "Schedule":
        """As `KFAC.settings` has it for a mini-batch of so many cases, some way into training."""
        T3 = settings.inverse_interval or LONGEST_INTERVAL
        adaptive = isinstance(settings.gamma, AdaptiveGamma)
        tau1, tau2 = settings.shares(cases)
        return cls(
            tau1=tau1,
            tau2=tau2,
            T1=_interval_of_rho(settings),
            T2=T3 if adaptive else getattr(settings.gamma, "interval", math.inf),
            T3=T3,
            directions=1 + settings.step_size.momentum,
            extra=1 if adaptive else 2,
            comparison=math.inf if settings.step_size.long_memory is None else COMPARING,
        )

    @classmethod
    def of_preset(cls, preset: Preset, cases: int) -> "Schedule":
        """As the optimizer itself understands the preset."""
        return cls.of(KFAC(nn.Linear(1, 1), Gaussian(), **arguments(preset)).settings, cases)

    @property
    def times(self) -> dict[str, float]:
        """How often an average step does each part, at the most: a search may have fewer candidates."""
        searches = 1 + self.extra / self.T2
        return {
            "gradient": 1.0,
            "statistics": 1.0,
            "inverse": 1 / self.T3 + self.extra / self.T2,
            "direction": searches,
            "fisher_products": searches,
            "step_size": searches,
            "reduction_ratio": 1 / self.T1 + 1 / self.comparison,
            "commit": 1.0,
        }

    def __str__(self) -> str:
        numbers = asdict(self)
        parts = [f"τ{'₁₂'[i]} = {Fraction(numbers[f'tau{i + 1}'])}" for i in range(2)]
        parts += [f"T{'₁₂₃'[i]} = {numbers[f'T{i + 1}']:g}" for i in range(3)]
        return ", ".join(parts)


def _interval_of_rho(settings: Settings) -> float:
    """From the rule itself, in iterations far beyond its first."""
    rule, late = settings.damping, range(10_000, 10_100)
    found = [k for k in late if rule.measures(k) is not None]
    return len(late) / len(found) if found else math.inf


def in_words(preset: Preset) -> str:
    """For the line above a table, whatever the size of the mini-batch."""
    schedule = str(Schedule.of_preset(preset, 10**9))
    least = f"S₁ and S₂ of {LEAST_ROWS} rows at least"
    return schedule if preset == "paper" else f"{schedule}, {least}"

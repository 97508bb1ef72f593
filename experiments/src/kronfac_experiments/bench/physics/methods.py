"""Who solves the equations: K-FAC as it comes, Adam, SOAP and L-BFGS."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac_experiments.bench.race.soap import SOAP

LAST_RATE = 1e-3
"""Share of the peak at the end of the cosine."""
Closure = Callable[[], Tensor]
Make = Callable[[nn.Module, float | None], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer and the settings that it is tuned over.

    Args:
        name: For the tables.
        make: From the model and the setting to the optimizer.
        grid: Settings that are tried; empty if there is nothing to tune.
        setting: What they are.
        cosine: Whether the rate falls to `LAST_RATE` of itself over the seconds of a run.
    """

    name: str
    make: Make
    grid: tuple[float, ...] = ()
    setting: str = ""
    cosine: bool = False

    def rate(self, setting: float | None, share: float) -> float | None:
        """The learning rate after a share of the run; None if there is no schedule."""
        if not self.cosine or setting is None:
            return None
        falling = (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return setting * (LAST_RATE + (1 - LAST_RATE) * falling)


def _kfac(**options: Any) -> Make:
    return lambda model, _: KFAC(model, nn.MSELoss(), **options)


def _adam(model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    assert lr is not None
    return torch.optim.Adam(model.parameters(), lr=lr)


def _soap(model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    assert lr is not None
    return SOAP(model.parameters(), lr=lr)


def _lbfgs(model: nn.Module, history: float | None) -> torch.optim.Optimizer:
    assert history is not None
    return torch.optim.LBFGS(
        model.parameters(),
        history_size=int(history),
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )


METHODS = (
    Method("K-FAC", _kfac()),
    Method("L-BFGS", _lbfgs, (5, 20, 50, 100), "history"),
    Method("SOAP, cosine", _soap, (3e-3, 1e-2, 3e-2, 0.1, 0.3), "learning rate", cosine=True),
    Method("Adam, cosine", _adam, (1e-3, 3e-3, 1e-2, 3e-2, 0.1), "learning rate", cosine=True),
)
NAMES = dict(zip(("kfac", "lbfgs", "soap", "adam"), METHODS, strict=True))
"""For the command line."""


def methods_named(names: Sequence[str]) -> tuple[Method, ...]:
    """Those, or all.

    Raises:
        ValueError: there is none of that name.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"--methods are of {', '.join(NAMES)}; got {', '.join(unknown)}.")
    return tuple(NAMES[name] for name in names or NAMES)

"""kronfac: K-FAC for PyTorch, all of Martens and Grosse (2015)."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# The garbage collector would go through all of torch's objects several times: half the time of the import.
_collects = gc.isenabled()
gc.disable()
try:
    from kronfac import presets
    from kronfac.control import (
        AdaptiveDamping,
        AdaptiveGamma,
        ConjugateGradients,
        FixedDamping,
        FixedGamma,
        GammaSearch,
        LevenbergMarquardtRule,
        QuadraticModel,
        RawStep,
    )
    from kronfac.errors import KronfacError
    from kronfac.kfac import KFAC
    from kronfac.model import Blocks, register
    from kronfac.objective import (
        Bernoulli,
        Categorical,
        Gaussian,
        GaussNewton,
        HeteroscedasticGaussian,
        Huber,
        Poisson,
        least_squares,
        observe,
    )
    from kronfac.report import EventKind, StepReport, log_to
    from kronfac.settings import Intervals
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from kronfac import extend as extend
    from kronfac import integrations as integrations
    from kronfac import physics as physics
    from kronfac import testing as testing
    from kronfac.planning import plan
    from kronfac.preconditioner import Preconditioner
    from kronfac.training import AdaptiveBatchSampler
    from kronfac.whitened_momentum import WhitenedMomentum

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "AdaptiveBatchSampler",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "Bernoulli",
    "Blocks",
    "Categorical",
    "ConjugateGradients",
    "EventKind",
    "FixedDamping",
    "FixedGamma",
    "GammaSearch",
    "GaussNewton",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Huber",
    "Intervals",
    "KronfacError",
    "LevenbergMarquardtRule",
    "Poisson",
    "Preconditioner",
    "QuadraticModel",
    "RawStep",
    "StepReport",
    "WhitenedMomentum",
    "least_squares",
    "log_to",
    "observe",
    "plan",
    "presets",
    "register",
]

_LATER = {
    "plan": "kronfac.planning",
    "Preconditioner": "kronfac.preconditioner",
    "AdaptiveBatchSampler": "kronfac.training",
    "WhitenedMomentum": "kronfac.whitened_momentum",
}
"""Where names are that few programs use: imported when they are asked for, so that the import is quick."""
_PACKAGES = ("extend", "integrations", "physics", "testing")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"kronfac.{name}")
    if name not in _LATER:
        where = (
            ": it is in kronfac.extend" if name in import_module("kronfac.extend").__all__ else ""
        )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, "__version__"})

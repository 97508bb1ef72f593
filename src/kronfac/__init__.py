"""kronfac: K-FAC for PyTorch, all of Martens and Grosse (2015)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kronfac import presets
from kronfac.control import (
    Acceptance,
    AdaptiveDamping,
    AdaptiveGamma,
    ConjugateGradients,
    DampingRule,
    DampingState,
    FixedDamping,
    FixedGamma,
    GammaRule,
    GammaSearch,
    GammaState,
    GeodesicSteps,
    LambdaSearch,
    LevenbergMarquardt,
    LongMemory,
    Measurement,
    QuadraticModel,
    RawStep,
    Step,
    StepRule,
    StepState,
    TiedGamma,
)
from kronfac.curvature import (
    Block,
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    DenseBlock,
    DiagonalBlock,
    DiagonalMoments,
    EigenvalueCorrectedInverse,
    EmpiricalFisher,
    ExactFisher,
    ExactTikhonov,
    FactoredTikhonov,
    GroupedKroneckerBlock,
    KroneckerBlock,
    KroneckerSumBlock,
    Moments,
    SampledFisher,
)
from kronfac.errors import KronfacError
from kronfac.network import Adapter, Blocks, LinearAdapter, Use, register
from kronfac.objective import (
    Bernoulli,
    Categorical,
    ElementwiseLikelihood,
    Gaussian,
    GaussNewton,
    HeteroscedasticGaussian,
    Huber,
    Likelihood,
    Poisson,
    least_squares,
    observe,
)
from kronfac.optimizer import KFAC, plan
from kronfac.planning import Plan, World, WorldPlan
from kronfac.report import Event, EventKind, StepReport
from kronfac.settings import First
from kronfac.storage import Storable

if TYPE_CHECKING:
    from kronfac.preconditioner import Preconditioner
    from kronfac.reporting import log_to
    from kronfac.training import (
        AdaptiveBatchSampler,
        ExponentialBatchSize,
        ScheduledBatchSampler,
        averaged,
        sparse_,
    )

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "Acceptance",
    "Adapter",
    "AdaptiveBatchSampler",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "Bernoulli",
    "Block",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "Blocks",
    "Categorical",
    "ConjugateGradients",
    "DampingRule",
    "DampingState",
    "DenseBlock",
    "DiagonalBlock",
    "DiagonalMoments",
    "EigenvalueCorrectedInverse",
    "ElementwiseLikelihood",
    "EmpiricalFisher",
    "Event",
    "EventKind",
    "ExactFisher",
    "ExactTikhonov",
    "ExponentialBatchSize",
    "FactoredTikhonov",
    "First",
    "FixedDamping",
    "FixedGamma",
    "GammaRule",
    "GammaSearch",
    "GammaState",
    "GaussNewton",
    "Gaussian",
    "GeodesicSteps",
    "GroupedKroneckerBlock",
    "HeteroscedasticGaussian",
    "Huber",
    "KroneckerBlock",
    "KroneckerSumBlock",
    "KronfacError",
    "LambdaSearch",
    "LevenbergMarquardt",
    "Likelihood",
    "LinearAdapter",
    "LongMemory",
    "Measurement",
    "Moments",
    "Plan",
    "Poisson",
    "Preconditioner",
    "QuadraticModel",
    "RawStep",
    "SampledFisher",
    "ScheduledBatchSampler",
    "Step",
    "StepReport",
    "StepRule",
    "StepState",
    "Storable",
    "TiedGamma",
    "Use",
    "World",
    "WorldPlan",
    "averaged",
    "least_squares",
    "log_to",
    "observe",
    "plan",
    "presets",
    "register",
    "sparse_",
]

_LATER = {
    "Preconditioner": "kronfac.preconditioner",
    "log_to": "kronfac.reporting",
    "AdaptiveBatchSampler": "kronfac.training",
    "ExponentialBatchSize": "kronfac.training",
    "ScheduledBatchSampler": "kronfac.training",
    "averaged": "kronfac.training",
    "sparse_": "kronfac.training",
}
"""Where names are that few programs use: imported when they are asked for, so that the import is quick."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})

"""kronfac: K-FAC for PyTorch, all of Martens and Grosse (2015)."""

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
from kronfac.errors import KronfacError
from kronfac.inverses import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    ExactTikhonov,
    FactoredTikhonov,
)
from kronfac.objective import Bernoulli, Categorical, Gaussian
from kronfac.optimizer import KFAC
from kronfac.report import Event, EventKind, StepReport
from kronfac.statistics import EmpiricalFisher, ExactFisher, SampledFisher
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
    "AdaptiveBatchSampler",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "Bernoulli",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "Categorical",
    "ConjugateGradients",
    "DampingRule",
    "DampingState",
    "EmpiricalFisher",
    "Event",
    "EventKind",
    "ExactFisher",
    "ExactTikhonov",
    "ExponentialBatchSize",
    "FactoredTikhonov",
    "FixedDamping",
    "FixedGamma",
    "GammaRule",
    "GammaSearch",
    "GammaState",
    "Gaussian",
    "KronfacError",
    "LambdaSearch",
    "LevenbergMarquardt",
    "LongMemory",
    "Measurement",
    "QuadraticModel",
    "RawStep",
    "SampledFisher",
    "ScheduledBatchSampler",
    "Step",
    "StepReport",
    "StepRule",
    "StepState",
    "TiedGamma",
    "averaged",
    "presets",
    "sparse_",
]

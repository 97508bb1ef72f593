"""kronfac: K-FAC for PyTorch, all of Martens and Grosse (2015)."""

from kronfac import presets
from kronfac.errors import KronfacError
from kronfac.inverses import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    ExactTikhonov,
    FactoredTikhonov,
)
from kronfac.objective import Bernoulli, Categorical, Gaussian
from kronfac.optimizer import KFAC
from kronfac.report import Event, StepReport
from kronfac.statistics import EmpiricalFisher, ExactFisher, SampledFisher
from kronfac.step_size import (
    AdaptiveDamping,
    AdaptiveGamma,
    ConjugateGradients,
    FixedDamping,
    FixedGamma,
    GammaSearch,
    LevenbergMarquardt,
    LongMemory,
    QuadraticModel,
    RawStep,
    TiedGamma,
)
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
    "AdaptiveBatchSampler",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "Bernoulli",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "Categorical",
    "ConjugateGradients",
    "EmpiricalFisher",
    "Event",
    "ExactFisher",
    "ExactTikhonov",
    "ExponentialBatchSize",
    "FactoredTikhonov",
    "FixedDamping",
    "FixedGamma",
    "GammaSearch",
    "Gaussian",
    "KronfacError",
    "LevenbergMarquardt",
    "LongMemory",
    "QuadraticModel",
    "RawStep",
    "SampledFisher",
    "ScheduledBatchSampler",
    "StepReport",
    "TiedGamma",
    "averaged",
    "presets",
    "sparse_",
]

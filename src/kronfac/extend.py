"""Base classes, rule states and parts of rules, for additions from outside the package.

`kronfac.testing` has the conformance kits that such additions pass.
"""

from kronfac.control import (
    Acceptance,
    DampingRule,
    DampingState,
    GammaRule,
    GammaState,
    LambdaSearch,
    LongMemory,
    Measurement,
    Step,
    StepRule,
    StepState,
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
from kronfac.model import Adapter, LinearAdapter, Use
from kronfac.objective import ElementwiseLikelihood, Likelihood
from kronfac.report import Event
from kronfac.settings import First
from kronfac.storage import Storable

__all__ = [
    "Acceptance",
    "Adapter",
    "Block",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "DampingRule",
    "DampingState",
    "DenseBlock",
    "DiagonalBlock",
    "DiagonalMoments",
    "EigenvalueCorrectedInverse",
    "ElementwiseLikelihood",
    "EmpiricalFisher",
    "Event",
    "ExactFisher",
    "ExactTikhonov",
    "FactoredTikhonov",
    "First",
    "GammaRule",
    "GammaState",
    "GroupedKroneckerBlock",
    "KroneckerBlock",
    "KroneckerSumBlock",
    "LambdaSearch",
    "Likelihood",
    "LinearAdapter",
    "LongMemory",
    "Measurement",
    "Moments",
    "SampledFisher",
    "Step",
    "StepRule",
    "StepState",
    "Storable",
    "Use",
]

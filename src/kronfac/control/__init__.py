"""λ, γ, the step (α, μ) and its acceptance: rules that see numbers only [MG15 §6.4–§7]."""

from kronfac.control.acceptance import Acceptance, AcceptanceState, Kept, Losses, Pending, Verdict
from kronfac.control.adaptive_damping import AdaptiveDamping
from kronfac.control.adaptive_gamma import AdaptiveGamma, AdaptiveGammaState
from kronfac.control.base import ROUNDING, Measurement, ParameterVector, Rule
from kronfac.control.conjugate_gradients import ConjugateGradients, refine
from kronfac.control.damping_rule import AnyDampingRule, DampingRule, DampingState
from kronfac.control.fixed_damping import FixedDamping
from kronfac.control.fixed_gamma import FixedGamma
from kronfac.control.gamma_rule import AnyGammaRule, GammaRule, GammaState
from kronfac.control.gamma_search import GammaSearch
from kronfac.control.geodesic_steps import GeodesicSteps
from kronfac.control.lambda_search import LambdaSearch
from kronfac.control.levenberg_marquardt import LevenbergMarquardt
from kronfac.control.long_memory import LongMemory, MemoryState
from kronfac.control.quadratic_form import Coefficients, Matrix, quadratic_form
from kronfac.control.quadratic_model import QuadraticModel, clip_to_objective, clip_to_radius
from kronfac.control.raw_step import RawStep
from kronfac.control.slopes import Slope, SlopeState, after_step, validate_slope
from kronfac.control.step_rule import Step, StepRule, StepState
from kronfac.control.tied_gamma import TiedGamma

__all__ = [
    "ROUNDING",
    "Acceptance",
    "AcceptanceState",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "AdaptiveGammaState",
    "AnyDampingRule",
    "AnyGammaRule",
    "Coefficients",
    "ConjugateGradients",
    "DampingRule",
    "DampingState",
    "FixedDamping",
    "FixedGamma",
    "GammaRule",
    "GammaSearch",
    "GammaState",
    "GeodesicSteps",
    "Kept",
    "LambdaSearch",
    "LevenbergMarquardt",
    "LongMemory",
    "Losses",
    "Matrix",
    "Measurement",
    "MemoryState",
    "ParameterVector",
    "Pending",
    "QuadraticModel",
    "RawStep",
    "Rule",
    "Slope",
    "SlopeState",
    "Step",
    "StepRule",
    "StepState",
    "TiedGamma",
    "Verdict",
    "after_step",
    "clip_to_objective",
    "clip_to_radius",
    "quadratic_form",
    "refine",
    "validate_slope",
]

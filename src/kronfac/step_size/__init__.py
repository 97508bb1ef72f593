"""How far to go: (α, μ) by the exact-Fisher quadratic model, λ and γ [MG15 §6.4–§7]."""

from kronfac.step_size.adaptive_damping import DOMINATED, AdaptiveDamping
from kronfac.step_size.adaptive_gamma import AdaptiveGamma
from kronfac.step_size.conjugate_gradients import ConjugateGradients, refined
from kronfac.step_size.fisher_products import fisher_gram, fisher_product
from kronfac.step_size.gamma_search import FixedGamma, GammaRule, GammaSearch, Past, TiedGamma
from kronfac.step_size.levenberg_marquardt import (
    DampingRule,
    FixedDamping,
    LevenbergMarquardt,
    Verdict,
)
from kronfac.step_size.long_memory import NO_EXPERIENCE, Experience, LongMemory
from kronfac.step_size.quadratic_form import Matrix, Vector, quadratic_form
from kronfac.step_size.quadratic_model import (
    QuadraticModel,
    RawStep,
    Step,
    StepRule,
    within,
)

__all__ = [
    "DOMINATED",
    "NO_EXPERIENCE",
    "AdaptiveDamping",
    "AdaptiveGamma",
    "ConjugateGradients",
    "DampingRule",
    "Experience",
    "FixedDamping",
    "FixedGamma",
    "GammaRule",
    "GammaSearch",
    "LevenbergMarquardt",
    "LongMemory",
    "Matrix",
    "Past",
    "QuadraticModel",
    "RawStep",
    "Step",
    "StepRule",
    "TiedGamma",
    "Vector",
    "Verdict",
    "fisher_gram",
    "fisher_product",
    "quadratic_form",
    "refined",
    "within",
]

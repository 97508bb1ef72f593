"""Ready-made settings, as plain keyword arguments for `KFAC`."""

from typing import Any

from kronfac.control import GammaSearch, LevenbergMarquardtRule, QuadraticModel
from kronfac.settings import First, Intervals


def paper() -> dict[str, Any]:
    """The constants of the paper's experiments [MG15 §13] and of the authors' own program.

        KFAC(model, loss, inverse="block_tridiagonal", weight_decay=1e-5, **presets.paper())

    λ₀ = 150, ω₁ = (19/20)^T₁, T₁ = 5; γ₀ = √(λ₀ + η), ω₂ = √(19/20)^T₂, T₂ = 20, γ in [√η, 1]; T₃ = 20;
    τ₁ = 1/8, τ₂ = 1/4. The bounds on γ and the first examples as S₁ and S₂ are the program's. It had
    τ₂ = 1, which is `replace(paper()["intervals"], fisher_fraction=1.0)`.
    """
    return {
        "damping": LevenbergMarquardtRule(lambda_=150.0, interval=5, decay=19 / 20),
        "gamma": GammaSearch(interval=20, factor=(19 / 20) ** 0.5, maximum=1.0),
        "step_rule": QuadraticModel(bounded=False, memory=None),
        "intervals": Intervals(First(1 / 8), First(1 / 4), inverse_interval=20),
    }

"""The classifier of [MG15 §3] in batch mode: `problems.classifier_model` on 16×16 MNIST.

The paper's intervals T₁ = 5 and T₂ = T₃ = 20 are for long runs: in the 7 iterations of its figures they
would adapt λ once and γ never. On a network this small nothing of it costs much, so the inverse is
refreshed and λ adapted in every iteration, γ in every second.
"""

from typing import Any

from torch import nn

import kronfac
from kronfac_experiments.plain_steps import KfacSteps

CHUNK = 20_000
"""Examples of the batch at a time."""


def batch_mode(model: nn.Module, inverse: Any, lambda_: float, seed: int) -> KfacSteps:
    """K-FAC on the classifier, which is trained without weight decay.

    Args:
        model: What `problems.classifier_model` makes.
        inverse: As for `KFAC`.
        lambda_: λ₀.
        seed: Seed of the sampled targets.
    """
    optimizer = kronfac.KFAC(
        model,
        kronfac.Categorical(),
        inverse=inverse,
        fisher=kronfac.extend.SampledFisher(seed=seed),
        damping=kronfac.LevenbergMarquardtRule(lambda_=lambda_, interval=1, decay=0.8),
        gamma=kronfac.GammaSearch(interval=2, factor=0.7),
        intervals=kronfac.Intervals(inverse_interval=1),
    )
    return KfacSteps(optimizer, CHUNK)

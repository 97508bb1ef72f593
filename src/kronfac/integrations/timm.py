"""K-FAC for timm's models: `create_optimizer(model, loss, weight_decay=1e-4)`.

timm's own `create_optimizer_v2` gives an optimizer the parameters alone, and K-FAC needs the model.
"""

import importlib
from typing import Any

from torch import nn

from kronfac.kfac import KFAC
from kronfac.whitened_momentum import WhitenedMomentum


def create_optimizer(
    model: nn.Module, loss: nn.Module | None = None, *, weight_decay: float = 0.0, **settings: Any
) -> KFAC | WhitenedMomentum:
    """`KFAC`, or without a loss `WhitenedMomentum`, with timm's groups.

    Biases, norms and what the model names have no weight decay.

    Args:
        model: any model, such as `timm.create_model(…)`.
        loss: the loss module that the loop calls.
        weight_decay: of the other parameters.
        **settings: those of the optimizer.
    """
    optim: Any = importlib.import_module("timm.optim")
    undecayed: Any = getattr(model, "no_weight_decay", tuple)
    groups = optim.param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed())
    groups = [group for group in groups if group["params"]]
    if loss is None:
        return WhitenedMomentum(model, params=groups, weight_decay=weight_decay, **settings)
    return KFAC(model, loss, params=groups, weight_decay=weight_decay, **settings)

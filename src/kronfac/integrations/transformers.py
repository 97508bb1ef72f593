"""K-FAC in the Trainer of Hugging Face's transformers.

The Trainer gives a factory the model, which an optimizer's class does not get:

    Trainer(model, args, optimizer_cls_and_kwargs=trainer_optimizer(weight_decay=0.01), …)
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from kronfac.kfac import KFAC

_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters that have no weight decay in the Trainer."""


def trainer_optimizer(
    loss: nn.Module | None = None, *, weight_decay: float = 0.0, **settings: Any
) -> tuple[Callable[[], Callable[..., KFAC]], dict[str, Any]]:
    """What the Trainer takes as `optimizer_cls_and_kwargs`.

    The loss is the one that the model computes from its labels in its forward. The Trainer's
    `learning_rate` and `weight_decay` are Adam's and are not used; `lr` is 1 unless it is given. The
    Trainer's schedule and warm-up multiply each step.

    Args:
        loss: for a model whose loss is computed elsewhere, such as by `compute_loss_func`; None for
            `CrossEntropyLoss`.
        weight_decay: η, of all parameters but biases and those of normalisations.
        **settings: those of `KFAC`.
    """

    def make(model: nn.Module, **settings: Any) -> KFAC:
        groups = decay_groups(model, weight_decay)
        return KFAC(
            model, nn.CrossEntropyLoss() if loss is None else loss, params=groups, **settings
        )

    return lambda: make, settings


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The Trainer's two groups: weights, and without decay biases and parameters of normalisations."""
    utilities = importlib.import_module("transformers.trainer_pt_utils")
    decayed = set(utilities.get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = [[p for n, p in named if (n in decayed) is part] for part in (True, False)]
    etas = (weight_decay, 0.0)
    return [
        {"params": part, "weight_decay": eta} for part, eta in zip(parts, etas, strict=True) if part
    ]

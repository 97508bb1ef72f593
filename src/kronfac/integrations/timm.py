"""timm: `timm.optim.create_optimizer_v2(model, opt="kfac", loss=nn.CrossEntropyLoss())`."""

import importlib
from typing import Any

from torch import Tensor, nn

from kronfac.groups import Params
from kronfac.optimizer import KFAC

NAME = "kfac"
"""What timm knows it by."""


def kfac(
    params: Params, loss: nn.Module | None = None, *, lr: float | Tensor = 1.0, **settings: Any
) -> KFAC:
    """`KFAC.for_parameters`, with the learning rate 1 if timm was given none."""
    return KFAC.for_parameters(params, loss, lr=lr, **settings)


def register() -> None:
    """Add `"kfac"` to timm's registry of optimizers; timm's groups without weight decay apply to it too."""
    optim: Any = importlib.import_module("timm.optim")
    if NAME in optim.list_optimizers():
        return
    # The one that create_optimizer_v2 looks at; timm does not export it by a public name.
    optim._optim_factory.default_registry.register(
        optim.OptimInfo(
            name=NAME,
            opt_class=kfac,
            description="K-FAC of Martens and Grosse (2015)",
            has_eps=False,
            second_order=True,
        )
    )

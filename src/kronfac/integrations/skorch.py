"""skorch: `NeuralNetClassifier(Module, optimizer=kronfac.integrations.skorch.kfac, lr=1.0)`.

skorch makes an optimizer with parameters and `lr`, which is 0.01 unless it is told otherwise, and passes a
closure to `step`, in which K-FAC sees the criterion. Settings go by skorch's names: `optimizer__inverse=…`.
A function by name, so that scikit-learn can clone and pickle nets; skorch itself is not imported.
"""

from typing import Any

from torch import Tensor

from kronfac.groups import Params
from kronfac.optimizer import KFAC


def kfac(params: Params, lr: float | Tensor, **settings: Any) -> KFAC:
    """`KFAC.for_parameters`, for the argument `optimizer` of skorch's nets.

    Args:
        params: from skorch.
        lr: the net's; give it 1.0.
        **settings: those of `KFAC`.
    """
    return KFAC.for_parameters(params, lr=lr, **settings)

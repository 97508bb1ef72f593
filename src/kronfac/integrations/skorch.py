"""K-FAC in skorch: a mixin that makes the optimizer with the module, and not with its parameters alone.

class Net(KFACMixin, NeuralNetClassifier):
pass

net = Net(Module, criterion=nn.CrossEntropyLoss, lr=1.0)
"""

from typing import Any

from kronfac.kfac import KFAC
from kronfac.whitened_momentum import WhitenedMomentum


class KFACMixin:
    """Makes a skorch net train with `KFAC`; stands before the net's own class.

    Settings of `KFAC` go by skorch's names, such as `optimizer__inverse="ekfac"`. The net's `lr`, 0.01 in
    skorch, should be 1.0. The loss is the net's criterion, unless `optimizer__loss` is given: a likelihood
    such as `kronfac.Categorical()`, for a criterion that KFAC does not know.

    `optimizer=kronfac.WhitenedMomentum` uses that one instead, for which skorch's own `lr` is right.
    """

    module_: Any
    optimizer: Any
    criterion_: Any

    def initialize_optimizer(self, triggered_directly: Any = None) -> Any:
        """Make the optimizer; called by skorch."""
        net: Any = self
        (params,), settings = net.get_params_for_optimizer(
            "optimizer", net.get_all_learnable_params()
        )
        if self.optimizer is WhitenedMomentum:
            self.optimizer_: Any = WhitenedMomentum(self.module_, params=params, **settings)
            return self
        loss = settings.pop("loss", self.criterion_)
        self.optimizer_ = KFAC(self.module_, loss, params=params, **settings)
        return self

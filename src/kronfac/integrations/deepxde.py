"""DeepXDE, with its PyTorch backend: `model.compile(kfac(net), loss=squared_error)`.

K-FAC can't see derivatives that `dde.grad` takes of the outputs by autograd. Instead the network returns
them as further outputs, computed by the forward Laplacian (`kronfac.physics`), and the equation uses those:

    net = network(perceptron)
    def pde(x, y):
        return net.jet(y).second[:, 0] - f(x)

`dde.grad` on such outputs is an error. Boundary conditions use `component=0`, the value.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import UnsupportedModelError
from kronfac.kfac import KFAC
from kronfac.physics import Jet, JetColumns


def network(
    perceptron: nn.Sequential,
    second: str | Sequence[tuple[int, int]] | Tensor = "laplacian",
) -> Any:
    """A network of DeepXDE's that returns its derivatives too; `net.jet(y)` picks them.

    Args:
        perceptron: as for `kronfac.physics.WithDerivatives`.
        second: as for `kronfac.physics.WithDerivatives`.
    """
    import deepxde  # noqa: PLC0415

    class JetNetwork(deepxde.nn.NN):  # type: ignore[misc, unused-ignore]
        """The columns of a perceptron's jet."""

        def __init__(self) -> None:
            super().__init__()
            self.columns = JetColumns(perceptron, second)

        def forward(self, x: Tensor) -> Tensor:
            if self._input_transform is not None or self._output_transform is not None:
                raise UnsupportedModelError(
                    "kronfac's network for DeepXDE supports no feature or output transform, whose "
                    "derivatives it would need too. Write them into the equation and the conditions."
                )
            y: Tensor = self.columns(x)
            return y

        def jet(self, y: Tensor) -> Jet:
            return self.columns.jet(y)

    return JetNetwork()


def squared_error(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """The mean squared error, for `model.compile(loss=…)`; K-FAC can't see DeepXDE's own."""
    return functional.mse_loss(y_pred, y_true)


def kfac(net: nn.Module, **settings: Any) -> KFAC:
    """K-FAC for `model.compile`, with the exact Fisher, which residuals gain from.

    Args:
        net: from `network`.
        **settings: those of `KFAC`.

    Raises:
        UnsupportedModelError: it is another network, whose derivatives `dde.grad` would take.
    """
    if not isinstance(getattr(net, "columns", None), JetColumns):
        raise UnsupportedModelError(
            "KFAC can't see derivatives that dde.grad takes of a network's outputs, nor their curvature; "
            f"got a {type(net).__name__}. Make the network with "
            "kronfac.integrations.deepxde.network, which returns them. For problems without derivatives, "
            "use kronfac.KFAC(net, torch.nn.MSELoss())."
        )
    return KFAC(net, nn.MSELoss(), **{"fisher": "exact", **settings})

"""PINA: `PhysicsInformedSingleModelSolver(problem, net, optimizer=kfac(problem, net))`.

K-FAC can't see derivatives that PINA's operators take of the outputs by autograd. Instead the network
returns them as further columns, computed by the forward Laplacian (`kronfac.physics`), under the names that
PINA's operators give them, and the equation uses those:

    class Poisson(SpatialProblem):
        output_variables = variables(["u"], ["x", "y"])  # u, dudx, dudy, ddu
        …
    def equation(x, u):
        return u["ddu"] - f(x)

An operator such as `laplacian` on these outputs is an error.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from kronfac.errors import UnsupportedModelError
from kronfac.kfac import KFAC
from kronfac.physics import JetColumns

Second = str | Sequence[tuple[str, str]]
"""`"laplacian"`, or pairs of inputs such as `("x", "y")` for ∂ₓ∂ᵧ."""


def variables(
    outputs: Sequence[str], inputs: Sequence[str], second: Second = "laplacian"
) -> list[str]:
    """Names of the columns that `network` returns, for a problem's `output_variables`.

    They are those of PINA's operators: `dudx`, `ddu` for the Laplacian, `ddudxdy` for ∂ₓ∂ᵧu.

    Args:
        outputs: names of what is solved for, such as ["u"].
        inputs: names of the inputs, in the order of the problem's `input_variables`.
        second: which second derivatives.
    """
    names = [*outputs, *(f"d{u}d{x}" for x in inputs for u in outputs)]
    if isinstance(second, str):
        return names + [f"dd{u}" for u in outputs]
    return names + [f"dd{u}d{x}d{y}" for x, y in second for u in outputs]


def network(
    perceptron: nn.Sequential, inputs: Sequence[str], second: Second = "laplacian"
) -> JetColumns:
    """A network for PINA's solvers that returns its derivatives too.

    Args:
        perceptron: as for `kronfac.physics.WithDerivatives`.
        inputs: names of the inputs, in the order of the problem's `input_variables`.
        second: which second derivatives, as for `variables`.
    """
    if isinstance(second, str):
        return JetColumns(perceptron, second)
    place = {name: i for i, name in enumerate(inputs)}
    unknown = [name for pair in second for name in pair if name not in place]
    if unknown:
        raise ValueError(
            f"network's second derivatives are by inputs, here {', '.join(inputs)}; got {unknown[0]!r}."
        )
    return JetColumns(perceptron, [(place[x], place[y]) for x, y in second])


def kfac(problem: Any, net: nn.Module, **settings: Any) -> Any:
    """K-FAC for the argument `optimizer` of PINA's solvers, with the exact Fisher for residuals.

    Args:
        problem: the solver's.
        net: from `network`; for a problem with targets and no derivatives, any network.
        **settings: those of `KFAC`.

    Raises:
        UnsupportedModelError: K-FAC would not see derivatives, or targets would be compared with them.
    """
    from pina.optim import TorchOptimizer  # noqa: PLC0415

    _check(problem, net)
    chosen = {"fisher": "exact", **settings} if isinstance(net, JetColumns) else settings

    class KFACOptimizer(TorchOptimizer):  # type: ignore[misc, unused-ignore]
        """Makes a `KFAC` when the solver asks for it."""

        def __init__(self) -> None:
            super().__init__(KFAC, **chosen)

        def hook(self, parameters: Any) -> None:
            # The network has them, and K-FAC needs it.
            self._optimizer_instance = KFAC(net, nn.MSELoss(), **self.kwargs)

    return KFACOptimizer()


def _check(problem: Any, net: nn.Module) -> None:
    """Refuse derivatives that K-FAC would not see, and targets that PINA would broadcast."""
    from pina.problem import InverseProblem  # noqa: PLC0415

    if isinstance(problem, InverseProblem):
        raise UnsupportedModelError(
            "KFAC trains the parameters of its model, and the unknown parameters of an InverseProblem are "
            f"outside of it; got a {type(problem).__name__}. Use kronfac.physics in a loop of your own, "
            "with the unknown parameters in the model."
        )
    targets = {name: getattr(c, "target", None) for name, c in problem.conditions.items()}
    if not isinstance(net, JetColumns):
        equations = [name for name, target in targets.items() if target is None]
        if equations:
            raise UnsupportedModelError(
                "KFAC can't see derivatives that an equation takes of a network's outputs by PINA's "
                f"operators, nor their curvature; the condition {equations[0]!r} has an equation, and the "
                f"network is a {type(net).__name__}. Make it with kronfac.integrations.pina.network, which "
                "returns them."
            )
        return
    width = len(problem.output_variables)
    for name, target in targets.items():
        if target is not None and target.shape[-1] != width:
            raise UnsupportedModelError(
                f"The condition {name!r} has targets of {target.shape[-1]} columns, which PINA would "
                f"subtract from all {width} that the network returns, derivatives among them. Write it as "
                "an equation, Condition(input=…, equation=…), whose targets are a function of the points."
            )

"""`kronfac.observe`: say what a tensor predicts, for losses that K-FAC does not know."""

import weakref
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from kronfac.errors import TargetError
from kronfac.objective.base import Likelihood
from kronfac.objective.gauss_newton import GaussNewton
from kronfac.objective.losses import READERS
from kronfac.objective.terms import Terms


class Listener(Protocol):
    """What is told of declarations that no record of a closure sees."""

    def hear(self, z: Tensor, likelihood: Likelihood, **options: Any) -> None:
        """Get what `observe` was called with."""


LISTENERS: "weakref.WeakSet[Listener]" = weakref.WeakSet()
"""All that are told."""


def observe(
    z: Tensor,
    likelihood: Likelihood,
    *,
    targets: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Declare that the objective has the summands scale · Σ_t w_t · −log r(y_t | z_t); returns z.

    For a loss that is written by hand, where the outputs are: in the closure or in the model. It changes
    nothing in what is computed. K-FAC's curvature is that of the declared terms; the loss itself is what
    the closure returns.

    Example:
        >>> z = kronfac.observe(model(x), kronfac.Gaussian(variance=0.5), scale=1 / len(x))
        >>> loss = (z - y).square().sum() / len(x)

    Args:
        z: outputs, (terms, …).
        likelihood: the predictive distribution that the loss is the negative logarithm of.
        targets: needed by `fisher="empirical"` and by `GaussNewton`, and used by `Huber`.
        weight: w, (terms,), such as 0 for padding.
        scale: s, such as 1/terms for a mean.
    """
    if has_torch_function_unary(z):
        result: Tensor = handle_torch_function(
            observe, (z,), z, likelihood, targets=targets, weight=weight, scale=scale
        )
        return result
    for listener in tuple(LISTENERS):
        listener.hear(z, likelihood, targets=targets, weight=weight, scale=scale)
    return z


def _read(
    z: Tensor,
    likelihood: Likelihood,
    *,
    targets: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Terms:
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"kronfac.observe needs a likelihood, such as kronfac.Gaussian(); got {likelihood!r}."
        )
    if targets is not None:
        targets = targets.detach()
        likelihood.check(z, targets)
        if isinstance(likelihood, GaussNewton):
            likelihood.check_terms(z, targets)
            likelihood = likelihood.arranged(z.shape[1:])
        elif targets.shape == z.shape:
            targets = targets.reshape(len(z), -1)
    if weight is not None and weight.shape != z.shape[:1]:
        raise TargetError(
            f"kronfac.observe needs one weight per term, of shape ({len(z)},); got "
            f"{tuple(weight.shape)}."
        )
    return Terms(likelihood, z.shape, scale, weight, targets, summed=scale == 1)


READERS[observe] = _read

"""A loss module as a predictive distribution with a scale.

Every supported loss is w Σ_cases −log r(y|z) for one of the likelihoods. The curvature of the
objective is then the Fisher times the same scale: F = c E[Jᵀ F_R J] with c = w · cases.

| module | likelihood | c, mean | c, sum |
| --- | --- | --- | --- |
| `kronfac.Gaussian`, `Bernoulli`, `Categorical` | itself | 1 | – |
| `MSELoss` | Gaussian(σ² = ½) | 1 / outputs | cases |
| `BCEWithLogitsLoss` | Bernoulli | 1 / outputs | cases |
| `CrossEntropyLoss` | Categorical | 1 | cases |

So `MSELoss()` is the average negative log-likelihood of a Gaussian with variance outputs / 2.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective.base import Likelihood
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian


@dataclass(frozen=True)
class Objective:
    """h(θ) = w Σ_cases −log r(y|z), as computed by `module`."""

    module: nn.Module
    """What the user calls."""
    likelihood: Likelihood
    reduction: str = "mean"
    """`"mean"` over cases or `"sum"`."""
    mean_over_outputs: bool = False
    """Whether the mean is also over the outputs of a case, as torch's element-wise losses take it."""
    ignore_index: int | None = None
    """The class that torch would leave out of the sum; such targets are refused."""

    def case_weight(self, cases: int, outputs: int) -> float:
        """c = w · cases: what multiplies the Fisher of an average case."""
        if self.reduction == "sum":
            return float(cases)
        return 1.0 / outputs if self.mean_over_outputs else 1.0

    def ignored(self, targets: Tensor) -> Tensor | None:
        """Whether one of them is `ignore_index`, on their device; None where no target can be."""
        if self.ignore_index is None or targets.is_floating_point():
            return None
        return (targets == self.ignore_index).any()

    def refuse_ignored(self, ignored: Tensor | None) -> None:
        """Raise `TargetError` if one of the targets is."""
        if ignored is not None and bool(ignored):
            raise TargetError(
                f"KFAC does not support targets equal to ignore_index ({self.ignore_index}); leave "
                "those cases out of the mini-batch."
            )

    def total(self, outputs: Tensor, targets: Tensor, cases: int) -> Tensor:
        """The share of these rows in the objective over `cases` rows."""
        weight = self.case_weight(cases, outputs[0].numel()) / cases
        return self.likelihood.negative_log_likelihood(outputs, targets) * weight


def objective_of(loss: nn.Module) -> Objective:
    """The objective that a loss module computes.

    Raises:
        UnsupportedLossError: the module is not in the table above, or has a weight, a reduction or
            an `ignore_index` that the table does not describe.
    """
    if isinstance(loss, Likelihood):
        return Objective(loss, loss)
    name = type(loss).__name__
    # Exact types: a subclass may compute anything in its forward.
    if type(loss) not in (nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss):
        raise UnsupportedLossError(
            f"KFAC needs a loss that is the negative log-likelihood of a predictive distribution; "
            f"{name} is not one it knows. Use MSELoss, BCEWithLogitsLoss, CrossEntropyLoss, "
            "kronfac.Gaussian, kronfac.Bernoulli or kronfac.Categorical."
        )
    reduction = str(loss.reduction)
    if reduction not in ("mean", "sum"):
        raise UnsupportedLossError(
            f"KFAC needs {name} with reduction 'mean' or 'sum', a scalar; got {reduction!r}."
        )
    for weight in ("weight", "pos_weight"):
        if getattr(loss, weight, None) is not None:
            raise UnsupportedLossError(
                f"KFAC does not know the Fisher of {name} with {weight}; use one without. (Weighing "
                "cases by how often they are drawn has the same effect in expectation.)"
            )
    if isinstance(loss, nn.MSELoss):
        return Objective(loss, Gaussian(variance=0.5), reduction, mean_over_outputs=True)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return Objective(loss, Bernoulli(), reduction, mean_over_outputs=True)
    assert isinstance(loss, nn.CrossEntropyLoss)
    return Objective(
        loss, Categorical(loss.label_smoothing), reduction, ignore_index=loss.ignore_index
    )

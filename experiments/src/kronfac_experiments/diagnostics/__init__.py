"""How good the Kronecker-factored Fisher is on a model of yours [MG15 §3, §4.4, §6.4, App. A].

    F  = exact_fisher(model, loss, x)                the Fisher, dense
    F̃  = kronecker_fisher(model, loss, x)            every block A_ij ⊗ G_ij of it
    F̆, F̂ and the inverses of all three               F̃.damped(γ).block_tridiagonal_inverse(), …
    approximation_error(model, loss, x)              Σ |F − F̃| beside the bound by cumulants
    damping_sweep(optimizer, closure, gammas)        what the next step would improve, by its γ

Matrices here are dense, in float64 and without sampling: the expectation over the model's own y is in
closed form, that over x is the mean over the given examples. That suits networks of a few thousand
weights, or a few layers of a larger one (`layers=`); more is refused with the memory it would need.

The rows and columns of every matrix are the entries of θ = [vec(W₁); vec(W₂); …], vec stacking the
columns of W = [W b], as in the paper.
"""

from kronfac_experiments.diagnostics.approximation import (
    ApproximationError,
    Comparison,
    approximation_error,
    compare,
)
from kronfac_experiments.diagnostics.block_matrix import BlockMatrix, TooLargeError
from kronfac_experiments.diagnostics.cumulants import Cumulants, cumulants
from kronfac_experiments.diagnostics.damping import Improvement, damping_sweep
from kronfac_experiments.diagnostics.exact import exact_fisher
from kronfac_experiments.diagnostics.kronecker import KroneckerFisher, kronecker_fisher
from kronfac_experiments.diagnostics.plots import draw_absolute, white_level

__all__ = [
    "ApproximationError",
    "BlockMatrix",
    "Comparison",
    "Cumulants",
    "Improvement",
    "KroneckerFisher",
    "TooLargeError",
    "approximation_error",
    "compare",
    "cumulants",
    "damping_sweep",
    "draw_absolute",
    "exact_fisher",
    "kronecker_fisher",
    "white_level",
]

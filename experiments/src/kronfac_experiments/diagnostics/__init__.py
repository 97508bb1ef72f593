"""How good the Kronecker-factored Fisher is on a perceptron [MG15 §3, §4.4, §6.4, App. A].

    examples = Examples(model, likelihood, x, layers)
    F  = exact_fisher(examples)                      the Fisher, dense
    F̃  = kronecker_fisher(examples)                  every block A_ij ⊗ G_ij of it
    F̆, F̂ and the inverses of all three               F̃.damped(γ).block_tridiagonal_inverse(), …
    ApproximationError.of(F, F̃, cumulants(examples)) Σ |F − F̃| beside the bound by cumulants
    damping_sweep(optimizer, closure, gammas)        what the next step would improve, by its γ

Matrices are dense, in float64 and without sampling, for networks of a few thousand weights. Their rows and
columns are the entries of θ = [vec(W₁); vec(W₂); …], vec stacking the columns of W = [W b].
"""

from kronfac_experiments.diagnostics.block_matrix import BlockMatrix, Comparison, compare
from kronfac_experiments.diagnostics.cumulants import ApproximationError, Cumulants, cumulants
from kronfac_experiments.diagnostics.damping import Improvement, damping_sweep
from kronfac_experiments.diagnostics.fisher import Examples, exact_fisher
from kronfac_experiments.diagnostics.kronecker import KroneckerFisher, kronecker_fisher

__all__ = [
    "ApproximationError",
    "BlockMatrix",
    "Comparison",
    "Cumulants",
    "Examples",
    "Improvement",
    "KroneckerFisher",
    "compare",
    "cumulants",
    "damping_sweep",
    "exact_fisher",
    "kronecker_fisher",
]

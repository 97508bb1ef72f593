"""Every matrix of the paper by its definition: dense, float64, torch only.

Nothing here is fast or clever, and nothing here imports kronfac. Layers are 0-based. A network is an
`nn.Sequential` (nested ones count as flat) of `nn.Linear` and element-wise modules; its parameter
vector is θ = [vec(W₁); vec(W₂); …] with W_i = [W b], or W alone where there is no bias, and vec stacks
columns. Likelihoods go by name: "gaussian" (with a variance), "bernoulli", "categorical".
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

Blocks = list[list[Tensor]]
"""Blocks[i][j] of a block matrix over pairs of layers."""


# ------------------------------------------------------------------------------------- vectors


def vec(V: Tensor) -> Tensor:
    """The columns of V on top of each other [MG15 §2.1]."""
    return V.mT.reshape(-1)


def unvec(v: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix of this shape whose columns v stacks."""
    rows, columns = shape
    return v.reshape(columns, rows).mT


def flatten(matrices: Sequence[Tensor]) -> Tensor:
    """[vec(V₁); vec(V₂); …]."""
    return torch.cat([vec(V) for V in matrices])


def unflatten(v: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The matrices V₁, V₂, … of these shapes that `flatten` makes v of."""
    parts = v.split([rows * columns for rows, columns in shapes])
    return tuple(unvec(part, shape) for part, shape in zip(parts, shapes, strict=True))


# ------------------------------------------------------------------------------------- networks


def chain(model: nn.Module) -> list[nn.Module]:
    """The modules of a Sequential in the order in which they are applied."""
    if isinstance(model, nn.Sequential):
        return [module for child in model for module in chain(child)]
    return [model]


def linears(model: nn.Module) -> list[nn.Linear]:
    """The layers W₁, W₂, … of a Sequential."""
    return [module for module in chain(model) if isinstance(module, nn.Linear)]


def layer_matrices(model: nn.Module) -> tuple[Tensor, ...]:
    """[W b] of every layer, detached."""
    return tuple(
        (
            layer.weight
            if layer.bias is None
            else torch.cat([layer.weight, layer.bias.unsqueeze(1)], 1)
        ).detach()
        for layer in linears(model)
    )


def shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(out, in+1) of every layer."""
    return [tuple(W.shape) for W in layer_matrices(model)]


def theta(model: nn.Module) -> Tensor:
    """θ."""
    return flatten(layer_matrices(model))


def network_function(model: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """f(x, θ), differentiable in θ, for any module whose layers `linears` finds."""
    names = {id(module): name for name, module in model.named_modules()}
    parameters = {}
    for layer, W in zip(linears(model), unflatten(theta, shapes(model)), strict=True):
        prefix = f"{names[id(layer)]}." if names[id(layer)] else ""
        parameters[prefix + "weight"] = W[:, : layer.in_features]
        if layer.bias is not None:
            parameters[prefix + "bias"] = W[:, -1]
    return functional_call(model, parameters, (x,))


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """J = ∂f(x, θ)/∂θ of every case, (cases, outputs, parameters)."""
    return jacrev(lambda t: network_function(model, t, x).flatten(1))(theta(model))


def gradient(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """∇_θ of a loss module's value, (parameters,)."""
    return jacrev(lambda t: loss(network_function(model, t, x), y))(theta(model))


def layer_inputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """ā_{i−1}, the input of every layer with a one appended where there is a bias, (cases, in+1)."""
    inputs = []
    for module in chain(model):
        if isinstance(module, nn.Linear):
            ones = [] if module.bias is None else [x.new_ones(len(x), 1)]
            inputs.append(torch.cat([x, *ones], dim=1).detach())
        x = module(x)
    return inputs


def preactivation_jacobians(model: nn.Module, x: Tensor) -> list[Tensor]:
    """∂f/∂s_i of every case and layer, (cases, outputs, out), by shifting each s_i."""
    layers = linears(model)

    def outputs(shifts: tuple[Tensor, ...], case: Tensor) -> Tensor:
        left = iter(shifts)
        for module in chain(model):
            case = module(case)
            if isinstance(module, nn.Linear):
                case = case + next(left)
        return case

    zeros = tuple(layer.weight.new_zeros(layer.out_features) for layer in layers)
    return [J.detach() for J in vmap(jacrev(outputs), in_dims=(None, 0))(zeros, x)]


# --------------------------------------------------------------------------- predictive distributions


def output_fisher(z: Tensor, likelihood: str, variance: float = 1.0) -> Tensor:
    """F_R of every case, (cases, outputs, outputs), in closed form."""
    if likelihood == "gaussian":
        return torch.eye(z.shape[1], dtype=z.dtype).expand(len(z), -1, -1) / variance
    if likelihood == "bernoulli":
        p = 1 / (1 + torch.exp(-z))
        return torch.diag_embed(p * (1 - p))
    if likelihood == "categorical":
        p = torch.exp(z) / torch.exp(z).sum(dim=1, keepdim=True)
        return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    raise ValueError(likelihood)


# -------------------------------------------------------------------------------------- Fishers


def exact_fisher(
    model: nn.Module, x: Tensor, likelihood: str, variance: float = 1.0, scale: float = 1.0
) -> Tensor:
    """F = scale · E_x[Jᵀ F_R J] [MG15 App. C]."""
    J = jacobian(model, x)
    F_R = output_fisher(model(x).detach(), likelihood, variance)
    return scale * torch.einsum("cop,coq,cqr->pr", J, F_R, J) / len(x)


def moments(
    model: nn.Module, x: Tensor, likelihood: str, variance: float = 1.0, scale: float = 1.0
) -> tuple[Blocks, Blocks]:
    """Ā_{ij} = E[ā_i ā_jᵀ] and G_{ij} = scale · E[g_i g_jᵀ] for all i, j [MG15 §3].

    The expectation over y is in closed form: E_y[g_i g_jᵀ] = J_iᵀ F_R J_j with J_i = ∂f/∂s_i.
    """
    a = layer_inputs(model, x)
    J = preactivation_jacobians(model, x)
    F_R = output_fisher(model(x).detach(), likelihood, variance)
    A = [[a_i.mT @ a_j / len(x) for a_j in a] for a_i in a]
    G = [
        [scale * torch.einsum("coi,cop,cpj->ij", J_i, F_R, J_j) / len(x) for J_j in J] for J_i in J
    ]
    return A, G


def empirical_moments(model: nn.Module, x: Tensor, scores: Tensor) -> tuple[Blocks, Blocks]:
    """Ā_{ij} and E[g_i g_jᵀ] for g = (∂f/∂s)ᵀ score, given the scores (cases, outputs)."""
    a = layer_inputs(model, x)
    g = [torch.einsum("coi,co->ci", J, scores) for J in preactivation_jacobians(model, x)]
    A = [[a_i.mT @ a_j / len(x) for a_j in a] for a_i in a]
    G = [[g_i.mT @ g_j / len(x) for g_j in g] for g_i in g]
    return A, G


def kron(A: Tensor, B: Tensor) -> Tensor:
    """A ⊗ B: the block matrix with blocks A_{ij} B."""
    product = torch.einsum("ij,kl->ikjl", A, B)
    return product.reshape(A.shape[0] * B.shape[0], A.shape[1] * B.shape[1])


def eigenvalue_corrected(F: Tensor, E: Tensor) -> Tensor:
    """E diag(Eᵀ F E) Eᵀ, the nearest to F that E diagonalises (George et al. 2018)."""
    return E @ torch.diag((E.mT @ F @ E).diagonal()) @ E.mT


def assemble(blocks: Blocks) -> Tensor:
    """One matrix from its blocks."""
    return torch.cat([torch.cat(row, dim=1) for row in blocks], dim=0)


def kron_blocks(A: Blocks, G: Blocks) -> Blocks:
    """F̃_{ij} = Ā_{ij} ⊗ G_{ij}."""
    return [
        [kron(a, g) for a, g in zip(A_i, G_i, strict=True)] for A_i, G_i in zip(A, G, strict=True)
    ]


def kron_fisher(A: Blocks, G: Blocks) -> Tensor:
    """F̃, all blocks [MG15 §3]."""
    return assemble(kron_blocks(A, G))


def block_diagonal_fisher(A: Blocks, G: Blocks) -> Tensor:
    """F̆ = diag(F̃₁₁, F̃₂₂, …) [MG15 §4.2]."""
    blocks = kron_blocks(A, G)
    return torch.block_diag(*(blocks[i][i] for i in range(len(blocks))))


def block_tridiagonal_fisher(A: Blocks, G: Blocks) -> Tensor:
    """F̂, from the tridiagonal blocks of F̃ and the Markov property [MG15 §4.3].

    In a Gaussian chain layer i and layer j > i + 1 are independent given layer i + 1, so that
    F̂_{ij} = F̂_{i,i+1} F̂_{i+1,i+1}⁻¹ F̂_{i+1,j}.
    """
    tilde = kron_blocks(A, G)
    count = len(tilde)
    hat: Blocks = [[tilde[i][j] for j in range(count)] for i in range(count)]
    for distance in range(2, count):
        for i in range(count - distance):
            j = i + distance
            hat[i][j] = hat[i][i + 1] @ torch.linalg.inv(hat[i + 1][i + 1]) @ hat[i + 1][j]
            hat[j][i] = hat[i][j].mT
    return assemble(hat)


def block_tridiagonal_inverse_upwards(A: Blocks, G: Blocks) -> Tensor:
    """F̂⁻¹ = Ξᵀ Λ Ξ with the edges from lower to higher layers, opposite to the paper's choice.

    vec(DW_{i+1}) ~ N(Φ_i vec(DW_i), Σ_i), Φ_i = F̃_{i+1,i} F̃_{ii}⁻¹, so Ξ has −Φ_i below its diagonal.
    """
    tilde = kron_blocks(A, G)
    sizes = [len(tilde[i][i]) for i in range(len(tilde))]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    Xi = torch.eye(sum(sizes), dtype=tilde[0][0].dtype)
    covariances = [tilde[0][0]]
    for i in range(len(tilde) - 1):
        Phi = tilde[i + 1][i] @ torch.linalg.inv(tilde[i][i])
        rows = slice(starts[i + 1], starts[i + 1] + sizes[i + 1])
        Xi[rows, starts[i] : starts[i] + sizes[i]] = -Phi
        covariances.append(tilde[i + 1][i + 1] - Phi @ tilde[i][i] @ Phi.mT)
    Lambda = torch.block_diag(*(torch.linalg.inv(Sigma) for Sigma in covariances))
    return Xi.mT @ Lambda @ Xi


# --------------------------------------------------------------------------------------- damping


def pi(A: Tensor, G: Tensor, norm: str = "trace") -> Tensor:
    """π = (‖A ⊗ I‖ / ‖I ⊗ G‖)^½, with both norms taken of the dense products [MG15 §6.3].

    `norm` is "trace" (the nuclear norm), or "one" for π = 1.
    """
    if norm == "one":
        return torch.ones((), dtype=A.dtype)
    left = kron(A, torch.eye(len(G), dtype=G.dtype))
    right = kron(torch.eye(len(A), dtype=A.dtype), G)
    return (torch.linalg.matrix_norm(left, "nuc") / torch.linalg.matrix_norm(right, "nuc")).sqrt()


def factored_tikhonov(
    A: Blocks, G: Blocks, gamma: float, norm: str = "trace"
) -> tuple[Blocks, Blocks]:
    """A_ii + π_i γ I and G_ii + γ/π_i I; the other blocks as they are [MG15 §6.3, §6.6]."""
    A, G = [list(row) for row in A], [list(row) for row in G]
    for i in range(len(A)):
        ratio = pi(A[i][i], G[i][i], norm)
        A[i][i] = A[i][i] + ratio * gamma * torch.eye(len(A[i][i]), dtype=A[i][i].dtype)
        G[i][i] = G[i][i] + gamma / ratio * torch.eye(len(G[i][i]), dtype=G[i][i].dtype)
    return A, G


def exact_tikhonov(A: Blocks, G: Blocks, gamma: float) -> Tensor:
    """F̆ + γ² I."""
    F = block_diagonal_fisher(A, G)
    return F + gamma**2 * torch.eye(len(F), dtype=F.dtype)


# ------------------------------------------------------------------------------------ small algebra


def stein_dense(A: Tensor, B: Tensor, C: Tensor, D: Tensor, sign: float) -> Tensor:
    """A ⊗ B + sign · C ⊗ D [MG15 App. B]."""
    return kron(A, B) + sign * kron(C, D)


def minimise_over_span(H: Tensor, gradient: Tensor, directions: Sequence[Tensor]) -> Tensor:
    """The δ in the span of `directions` that minimises ½ δᵀHδ + gradientᵀδ, H positive definite.

    By an orthonormal basis of the span, so that dependent directions do no harm.
    """
    stacked = torch.stack(list(directions), dim=1)
    U, s, _ = torch.linalg.svd(stacked, full_matrices=False)
    basis = U[:, s > 1e-12 * s.max()] if bool(s.max() > 0) else U[:, :0]
    return -basis @ torch.linalg.solve(basis.mT @ H @ basis, basis.mT @ gradient)


def quadratic_change(H: Tensor, gradient: Tensor, delta: Tensor) -> Tensor:
    """M(δ) − M(0) = ½ δᵀHδ + gradientᵀδ [MG15 §6.4]."""
    return delta @ H @ delta / 2 + gradient @ delta

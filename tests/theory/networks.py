"""Networks as the paper writes them, and K-FAC's own quantities on them as dense matrices.

The parameters are W₁ … W_ℓ acting on homogeneous coordinates, so a Linear here has no bias: the
coordinate that is 1 is an input like any other, and can be mixed with the others by Ω. Every number
below comes out of kronfac: `curvature` from its statistics, `fisher` from its Fisher products.

vec stacks columns; a vector in parameter space is the vec of the layers' matrices, one after another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from kronfac.curvature import Curvature, DampedInverse
from kronfac.curvature.estimate import Sample, estimate
from kronfac.extend import ExactFisher
from kronfac.linearize import fisher_gram, linearize
from kronfac.model import Matrices, find_units, record_uses
from kronfac.objective import Likelihood
from tests.conftest import batch, network_of
from tests.reference.dense import flatten, kron, unflatten

Nonlinearity = Callable[[Tensor], Tensor]


def homogeneous(a: Tensor) -> Tensor:
    """ā = [a; 1]."""
    return torch.cat([a, a.new_ones(len(a), 1)], dim=1)


def linear(a: Tensor) -> Tensor:
    """φ(s) = s."""
    return a


class Network(nn.Module):
    """s_i = W_i ā_{i−1}, ā_i = Ω_i φ̄_i(Φ_i s_i), ā_0 = Ω_0 x̄; the output is a_ℓ = Φ_ℓ s_ℓ  [MG15 §10].

    With every Ω and Φ the identity this is the network of §2.1. The last nonlinearity belongs to the
    loss, so that the outputs are natural parameters.

    Args:
        weights: W_1 … W_ℓ.
        nonlinearities: φ_1 … φ_{ℓ−1}.
        Omega: Ω_0 … Ω_{ℓ−1}; Ω_ℓ is the identity by assumption.
        Phi: Φ_1 … Φ_ℓ.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        nonlinearities: Sequence[Nonlinearity],
        Omega: Sequence[Tensor] | None = None,
        Phi: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.nonlinearities = tuple(nonlinearities)
        self.Omega = tuple(Omega or (torch.eye(W.shape[1], dtype=W.dtype) for W in weights))
        self.Phi = tuple(Phi or (torch.eye(W.shape[0], dtype=W.dtype) for W in weights))
        self.layers = nn.ModuleList()
        for W in weights:
            layer = nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=W.dtype)
            layer.weight = nn.Parameter(W.detach().clone())
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        a = homogeneous(x) @ self.Omega[0].mT
        for i, nonlinearity in enumerate(self.nonlinearities):
            s = self.layers[i](a)
            a = homogeneous(nonlinearity(s @ self.Phi[i].mT)) @ self.Omega[i + 1].mT
        return self.layers[-1](a) @ self.Phi[-1].mT

    @property
    def weights(self) -> Matrices:
        """W_1 … W_ℓ, detached."""
        return tuple(layer.weight.detach().clone() for layer in self.layers)

    def transformed(self, Omega: Sequence[Tensor], Phi: Sequence[Tensor]) -> "Network":
        """The network with nonlinearities Ω φ̄(Φ s) that computes what this default one does.

        W_i† = Φ_i⁻¹ W_i Ω_{i−1}⁻¹, the inverse of ζ.
        """
        weights = [
            torch.linalg.solve(phi, torch.linalg.solve(omega, W, left=False))
            for omega, W, phi in zip(Omega, self.weights, Phi, strict=True)
        ]
        return Network(weights, self.nonlinearities, Omega, Phi)

    def zeta(self, weights: Sequence[Tensor]) -> Matrices:
        """ζ, linear, from this network's parameters to the default network's: W_i = Φ_i W_i† Ω_{i−1}."""
        matrices = zip(self.Omega, weights, self.Phi, strict=True)
        return tuple(phi @ W @ omega for omega, W, phi in matrices)


def random_network(
    sizes: Sequence[int],
    nonlinearity: Nonlinearity,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Network:
    """A default network with Gaussian weights and biases; `scale` makes up for a φ that is flat."""
    weights = [
        torch.randn(n_out, n_in + 1, generator=generator, dtype=torch.float64) * scale / n_in**0.5
        for n_in, n_out in pairwise(sizes)
    ]
    return Network(weights, [nonlinearity] * (len(weights) - 1))


def biased(network: Network, nonlinearity: type[nn.Module]) -> nn.Sequential:
    """The same weights in ordinary Linear layers with biases."""
    modules: list[nn.Module] = []
    for W in network.weights:
        layer = nn.Linear(W.shape[1] - 1, W.shape[0], dtype=W.dtype)
        with torch.no_grad():
            layer.weight.copy_(W[:, :-1])
            layer.bias.copy_(W[:, -1])
        modules += [layer, nonlinearity()]
    return nn.Sequential(*modules[:-1])


def random_invertible(size: int, generator: torch.Generator) -> Tensor:
    """U diag(s) Vᵀ with s from ½ to 2: nothing special about it but a condition number of 4."""
    U, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return U @ torch.diag(torch.linspace(-1, 1, size, dtype=torch.float64).exp2()) @ V.mT


# ------------------------------------------------------------------------------- kronfac's quantities


def curvature(model: nn.Module, loss: Likelihood, x: Tensor, coupled: bool = False) -> Curvature:
    """Ā and G on these inputs, exact in the expectation over the model's y; of neighbours if `coupled`."""
    network = network_of(model, loss)
    return estimate(
        Sample(batch(network, x).passes, partial(linearize, network)),
        [unit.block for unit in network.units],
        ExactFisher(),
        torch.Generator(),
        links=[coupled] * (len(network.units) - 1),
    )


def gradient(model: nn.Module, loss: Likelihood, x: Tensor, y: Tensor) -> Matrices:
    """∇h, one matrix per layer."""
    network = network_of(model, loss)
    return network.join(torch.autograd.grad(loss(model(x), y), network.parameters))


def fisher(model: nn.Module, loss: Likelihood, x: Tensor) -> Tensor:
    """The exact F, dense, from eᵢᵀ F eⱼ of all pairs of weights."""
    network = network_of(model, loss)
    directions = basis([unit.shape for unit in network.units])
    return fisher_gram(network, batch(network, x), directions)


def activities_and_gradients(
    model: nn.Module, loss: Likelihood, x: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """ā_{i−1} and g_i of every layer, (examples, features), for given targets."""
    found = find_units(model)
    with record_uses(found.sites, found.units, len(x)) as seen:
        outputs = model(x)
    uses = seen.uses
    at_uses = torch.autograd.grad(outputs, uses.edges, loss.score(outputs.detach(), y))
    # Every layer is used once, at one place.
    (taps,) = zip(*(uses.taps(n, at_uses) for n in range(len(found.units))), strict=True)
    return [tap.inputs[:, 0] for tap in taps], [tap.grads[:, 0] for tap in taps]


# -------------------------------------------------------------------------------------- dense algebra


def basis(shapes: Sequence[tuple[int, ...]]) -> list[Matrices]:
    """The unit vectors of parameter space."""
    size = sum(n_out * n_in for n_out, n_in in shapes)
    return [unflatten(e, shapes) for e in torch.eye(size, dtype=torch.float64)]


def block_slices(shapes: Sequence[tuple[int, ...]]) -> list[slice]:
    """Where each layer's parameters are in a vector of parameter space."""
    ends = torch.tensor([n_out * n_in for n_out, n_in in shapes]).cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def dense(inverse: DampedInverse, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """An inverse as a matrix, column by column."""
    return torch.stack([flatten(inverse.mv(e)) for e in basis(shapes)], dim=1)


def block_diagonal_fisher(moments: Curvature) -> Tensor:
    """F̆ = diag(A_0 ⊗ G_1, A_1 ⊗ G_2, …)."""
    return torch.block_diag(*(kron(block.A, block.G) for block in moments.blocks))

"""Derivatives of a network by its inputs, for the residuals of differential equations.

A perceptron takes its derivatives along with its value (the forward Laplacian of Li et al. 2023). Value u,
first derivatives ∂ᵢu in all directions, and second ones D_k u = Σ_ij C_kij ∂ᵢ∂ⱼu go through one layer after
the other:

    s = W a + b      ∂ᵢs = W ∂ᵢa       D_k s = W D_k a
    a = φ(s)         ∂ᵢa = φ′(s) ∂ᵢs   D_k a = φ′(s) D_k s + φ″(s) Σ_ij C_kij ∂ᵢs ∂ⱼs

So they are places at which the same weight is used, the bias acts on the value only, and a residual is an
ordinary output of an ordinary network with shared weights: the forward pass differentiates nothing by
autograd, and K-FAC sees all of it, as K-FAC expand.

Tensors are (points, places, features); the value has no dimension of places.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import UnsupportedModelError

Slopes = tuple[Tensor, Tensor, Tensor]
"""φ(s), φ′(s) and φ″(s)."""


class Jet(NamedTuple):
    """A function and its derivatives at some points."""

    value: Tensor
    """u, (points, outputs)."""
    first: Tensor
    """∂ᵢu, (points, inputs, outputs)."""
    second: Tensor
    """D_k u, (points, second derivatives, outputs)."""


@runtime_checkable
class Smooth(Protocol):
    """An activation that knows its own derivatives, such as `Sin`."""

    def slopes(self, s: Tensor) -> Slopes:
        """φ(s), φ′(s) and φ″(s)."""
        ...


class Sin(nn.Module):
    """sin(s), element by element."""

    def forward(self, s: Tensor) -> Tensor:
        """sin(s)."""
        return s.sin()

    def slopes(self, s: Tensor) -> Slopes:
        """sin, cos and −sin."""
        value = s.sin()
        return value, s.cos(), -value


class WithDerivatives(nn.Module):
    """A perceptron that returns its derivatives by its inputs too, as a `Jet`.

    Its parameters are those of the perceptron, which stays what it is and can be called by itself, for
    points at which the value is enough.

    Example:
        >>> u = WithDerivatives(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
        >>> jet = u(torch.rand(100, 2))
        >>> residual = jet.second[:, 0] + 1  # Δu + 1

    Args:
        perceptron: `Linear` layers and smooth activations in turn: `Tanh`, `Sigmoid`, `SiLU`, `GELU`,
            `Softplus`, `Identity`, or any module with a method `slopes`, see `Smooth`.
        second: which second derivatives. `"laplacian"` is a single one, Σᵢ ∂ᵢ∂ᵢ. Pairs of inputs are one
            each: [(0, 0), (0, 1)] are ∂₀∂₀ and ∂₀∂₁. A tensor holds the coefficients C,
            (second derivatives, inputs, inputs).
    """

    _pairs: Tensor
    _mixed: Tensor
    _squares: tuple[int, int] | None
    """From which input up to which one Σᵢ ∂ᵢ∂ᵢ is all there is; None if it is not."""

    def __init__(
        self,
        perceptron: nn.Sequential,
        second: str | Sequence[tuple[int, int]] | Tensor = "laplacian",
    ) -> None:
        super().__init__()
        _check(perceptron)
        self.perceptron = perceptron
        weight = next(perceptron.parameters())
        C = _coefficients(second, weight.shape[1])
        # Products ∂ᵢs ∂ⱼs that no second derivative needs are left out.
        pairs = (C.abs().sum(dim=0) > 0).nonzero()  # (pairs, 2)
        mixed = C[:, pairs[:, 0], pairs[:, 1]]  # (second derivatives, pairs)
        self._squares = _range_of_squares(C)
        self.register_buffer("_pairs", pairs.to(weight.device), persistent=False)
        self.register_buffer("_mixed", mixed.to(weight), persistent=False)

    def forward(self, x: Tensor) -> Jet:
        """The jet at the points x, (points, inputs)."""
        count, inputs = x.shape
        value = x
        slopes = torch.eye(inputs, dtype=x.dtype, device=x.device).expand(count, inputs, inputs)
        # Second derivatives of what is linear in x are 0, and a use of the weight there would be none:
        # they are left out until an activation has made some.
        bent = False
        for module in self.perceptron:
            if isinstance(module, nn.Linear):
                value = functional.linear(value, module.weight, module.bias)
                slopes = functional.linear(slopes, module.weight)
                continue
            value, steepness, curvature = _slopes_of(module)(value)
            second = curvature.unsqueeze(1) * self._products(slopes[:, :inputs])
            slopes = steepness.unsqueeze(1) * slopes
            if bent:
                second = second + slopes[:, inputs:]
            slopes = torch.cat([slopes[:, :inputs], second], dim=1)
            bent = True
        if not bent:
            slopes = torch.cat(
                [slopes, slopes.new_zeros(count, len(self._mixed), slopes.shape[2])], dim=1
            )
        return Jet(value, slopes[:, :inputs], slopes[:, inputs:])

    def _products(self, first: Tensor) -> Tensor:
        """Σ_ij C_kij ∂ᵢs ∂ⱼs, (points, second derivatives, features)."""
        if (
            self._squares is not None
        ):  # a sum, which is faster than a product with so small a matrix
            start, stop = self._squares
            squares = first[:, start:stop].square()
            return squares if stop - start == 1 else squares.sum(dim=1, keepdim=True)
        i, j = self._pairs.unbind(dim=1)
        return self._mixed @ (first[:, i] * first[:, j])


class JetColumns(nn.Module):
    """A perceptron whose outputs are the columns of its jet, for libraries that want one tensor.

    (points, outputs · (1 + inputs + second derivatives)): the values, then the first derivatives by each
    input, then the second ones. The inputs are detached: a derivative of these outputs by autograd, which
    K-FAC would not see, is an error of torch's.

    Args:
        perceptron: as for `WithDerivatives`.
        second: as for `WithDerivatives`.
    """

    def __init__(
        self,
        perceptron: nn.Sequential,
        second: str | Sequence[tuple[int, int]] | Tensor = "laplacian",
    ) -> None:
        super().__init__()
        self.derivatives = WithDerivatives(perceptron, second)
        layers = [module for module in perceptron if isinstance(module, nn.Linear)]
        self.inputs, self.outputs = layers[0].in_features, layers[-1].out_features

    def forward(self, x: Tensor) -> Tensor:
        """The columns at the points x, (points, inputs)."""
        # Without PINA's labels, which take time.
        jet: Jet = self.derivatives(x.detach().as_subclass(Tensor))
        return torch.cat([jet.value, jet.first.flatten(1), jet.second.flatten(1)], dim=1)

    def jet(self, y: Tensor) -> Jet:
        """The jet whose columns these are."""
        value, first = y[:, : self.outputs], self.outputs * (1 + self.inputs)
        return Jet(
            value,
            y[:, self.outputs : first].unflatten(1, (self.inputs, self.outputs)),
            y[:, first:].unflatten(1, (-1, self.outputs)),
        )


def _tanh(s: Tensor) -> Slopes:
    value = s.tanh()
    slope = 1 - value.square()
    return value, slope, -2 * value * slope


def _sigmoid(s: Tensor) -> Slopes:
    value = s.sigmoid()
    slope = value * (1 - value)
    return value, slope, slope * (1 - 2 * value)


def _silu(s: Tensor) -> Slopes:
    """φ = s σ, φ′ = σ + s σ′, φ″ = 2σ′ + s σ″."""
    value, slope, curvature = _sigmoid(s)
    return s * value, value + s * slope, 2 * slope + s * curvature


def _gelu(s: Tensor) -> Slopes:
    """φ = s Φ, φ′ = Φ + s p, φ″ = (2 − s²) p, with the normal distribution's Φ and its density p."""
    normal = 0.5 * (1 + torch.erf(s / math.sqrt(2)))
    density = torch.exp(-s.square() / 2) / math.sqrt(2 * math.pi)
    return s * normal, normal + s * density, (2 - s.square()) * density


def _softplus(s: Tensor) -> Slopes:
    """φ = log(1 + eˢ), φ′ = σ, φ″ = σ′."""
    value, slope, _ = _sigmoid(s)
    return functional.softplus(s, threshold=math.inf), value, slope


def _identity(s: Tensor) -> Slopes:
    return s, torch.ones_like(s), torch.zeros_like(s)


_SLOPES: dict[type[nn.Module], Callable[[Tensor], Slopes]] = {
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.SiLU: _silu,
    nn.GELU: _gelu,
    nn.Softplus: _softplus,
    nn.Identity: _identity,
}
"""Exact types: a subclass may do something else."""


def _slopes_of(module: nn.Module) -> Callable[[Tensor], Slopes]:
    if isinstance(module, Smooth):
        return cast(Smooth, module).slopes
    return _SLOPES[type(module)]


def _check(perceptron: nn.Module) -> None:
    """Refuse what is no perceptron of smooth functions."""
    if not isinstance(perceptron, nn.Sequential):
        raise UnsupportedModelError(
            "WithDerivatives needs an nn.Sequential of Linear layers and activations; got a "
            f"{type(perceptron).__name__}."
        )
    if not any(isinstance(module, nn.Linear) for module in perceptron):
        raise UnsupportedModelError(
            "WithDerivatives needs a perceptron with a Linear layer; got none."
        )
    for name, module in perceptron.named_children():
        plain = type(module) is nn.Linear or isinstance(module, Smooth)
        if plain or (type(module) in _SLOPES and _usual(module)):
            continue
        known = ", ".join(kind.__name__ for kind in _SLOPES)
        raise UnsupportedModelError(
            f"WithDerivatives needs Linear layers and activations with two derivatives; {name!r} is "
            f"{module}. Use {known} with their usual arguments or kronfac.physics.Sin, or give it a "
            "method slopes(s) that returns φ(s), φ′(s) and φ″(s)."
        )


def _usual(module: nn.Module) -> bool:
    """Whether an activation's arguments are those that `_SLOPES` is of."""
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    if isinstance(module, nn.Softplus):
        return module.beta == 1
    return True


def _coefficients(second: str | Sequence[tuple[int, int]] | Tensor, inputs: int) -> Tensor:
    """C, (second derivatives, inputs, inputs), float64."""
    if isinstance(second, Tensor):
        if second.dim() != 3 or second.shape[1:] != (inputs, inputs):
            raise ValueError(
                f"WithDerivatives needs coefficients (second derivatives, {inputs}, {inputs}) for "
                f"{inputs} inputs; got {tuple(second.shape)}."
            )
        return second.detach().double().cpu()
    if second == "laplacian":
        return torch.eye(inputs, dtype=torch.float64).unsqueeze(0)
    if isinstance(second, str):
        raise ValueError(
            f"WithDerivatives' second is 'laplacian', pairs of inputs or coefficients; got {second!r}."
        )
    C = torch.zeros(len(second), inputs, inputs, dtype=torch.float64)
    for k, pair in enumerate(second):
        i, j = pair
        if not (0 <= i < inputs and 0 <= j < inputs):
            raise ValueError(
                f"WithDerivatives' pairs are of inputs 0 to {inputs - 1}; got {tuple(pair)}."
            )
        C[k, i, j] = 1.0
    return C


def _range_of_squares(C: Tensor) -> tuple[int, int] | None:
    """From which input up to which one C is the only second derivative's Σᵢ ∂ᵢ∂ᵢ, if it is that."""
    used = C[0].diagonal().nonzero().flatten().tolist() if len(C) == 1 else []
    if not used:
        return None
    start, stop = used[0], used[-1] + 1
    expected = torch.zeros_like(C)
    expected[0].diagonal()[start:stop] = 1.0
    return (start, stop) if torch.equal(C, expected) else None

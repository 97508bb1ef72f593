"""Curvature blocks by their definitions, dense, from autograd and hooks: no tap, no observer.

The Fisher is Σ_r v_r v_rᵀ over vectors r in output space with Σ r rᵀ = ∂²h/∂z², each r of one term,
and v_r = Jᵀ r. A layer's s = V ā is seen by a forward hook: x and s, from which ā is computed with an
identity in place of the weight, and g_r = ∂(rᵀz)/∂s by autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.curvature import Block, DenseBlock, KroneckerBlock
from kronfac.model import Unit


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    module: nn.Module
    x: Tensor
    s: Tensor


@contextmanager
def calls_of(model: nn.Module) -> Iterator[list[Call]]:
    """All calls of modules that have parameters of their own."""
    found: list[Call] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, s: Any) -> Any:
        if not isinstance(s, Tensor):
            return s  # several products in one module
        x = args[0] if args else kwargs["input"]
        found.append(Call(module, x.detach().clone(), s))
        return s.clone()  # so that what is done to it in place leaves s as it was

    modules = [m for m in model.modules() if list(m.parameters(recurse=False))]
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def roots(z: Tensor, loss: nn.Module) -> list[Tensor]:
    """Vectors r, shaped as z, with Σ r rᵀ = ∂²h/∂z², for least squares and cross-entropy."""
    z = z.detach()
    flat = z.reshape(-1, z.shape[-1])
    mean, (terms, width) = loss.reduction == "mean", flat.shape
    eye = torch.eye(width).to(z)
    if isinstance(loss, nn.MSELoss):
        scale = 2 / z.numel() if mean else 2.0
        rows = [(t, eye[i]) for t in range(terms) for i in range(width)]
    else:
        scale, p = 1 / terms if mean else 1.0, flat.softmax(dim=1)
        rows = [(t, p[t, i].sqrt() * (eye[i] - p[t])) for t in range(terms) for i in range(width)]
    vectors = []
    for t, row in rows:
        r = torch.zeros_like(flat)
        r[t] = scale**0.5 * row
        vectors.append(r.view_as(z))
    return vectors


@dataclass(frozen=True)
class Truth:
    """All that the definitions need of one mini-batch."""

    examples: int
    calls: list[Call]
    gradients: list[list[Tensor]]
    """By vector r, ∂(rᵀz)/∂p of every parameter."""
    at_calls: list[list[Tensor]]
    """By vector r, ∂(rᵀz)/∂s of every call."""
    parameters: list[nn.Parameter]

    def vectors(self, unit: Unit) -> Tensor:
        """vec(V) of the gradients of a unit, which stacks columns, (vectors, parameters)."""
        place = {id(p): i for i, p in enumerate(self.parameters)}
        rows = []
        for grads in self.gradients:
            V = unit.join([grads[place[id(p)]] for p in unit.parameters])
            rows.append(V.mT.reshape(-1))
        return torch.stack(rows)

    def fisher(self, units: Sequence[Unit]) -> Tensor:
        """The Fisher over vec(V) of all units."""
        J = torch.cat([self.vectors(unit) for unit in units], dim=1)
        return J.mT @ J

    def moments(self, unit: Unit) -> Tensor:
        """The dense evaluation of a unit's block by its definition."""
        kind = type(unit.block).__name__
        assert kind in DEFINITIONS, (
            f"Write down the definition of {kind} here, apart from its source."
        )
        return DEFINITIONS[kind](self, unit, unit.block)

    def uses(self, unit: Unit, transposed: bool) -> tuple[list[Tensor], list[list[Tensor]]]:
        """ā of every use, (examples, places, features), and g of every vector and use.

        Of uses s = Vᵀ ā, or of those s = V ā.
        """
        own = {id(p) for p in unit.parameters}
        used = [
            n
            for n, call in enumerate(self.calls)
            if own & {id(p) for p in call.module.parameters(recurse=False)}
            and isinstance(call.module, TRANSPOSED) == transposed
        ]
        a = [_inputs(self.calls[n], unit, self.examples) for n in used]
        g = [
            [_outputs(self.calls[n], grads[n], self.examples) for n in used]
            for grads in self.at_calls
        ]
        return a, g


def truth(model: nn.Module, loss: nn.Module, run: Callable[[], Tensor], examples: int) -> Truth:
    """What `run()`, a forward pass of the model, shows; it returns what the loss is called with."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad(), calls_of(model) as calls:
        z = run()
    calls = [call for call in calls if call.s.requires_grad]
    gradients, at_calls = [], []
    for r in roots(z, loss):
        wanted = [*parameters, *(call.s for call in calls)]
        grads = torch.autograd.grad(z, wanted, r, retain_graph=True, allow_unused=True)
        filled = [
            torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)
        ]
        gradients.append(filled[: len(parameters)])
        at_calls.append(filled[len(parameters) :])
    return Truth(examples, calls, gradients, at_calls, parameters)


# ---------------------------------------------------------------------------------------- definitions


def _kronecker(truth: Truth, unit: Unit, block: Block) -> Tensor:
    """A ⊗ G, from whichever uses there are."""
    assert isinstance(block, KroneckerBlock)
    direct, transposed = (_product(truth, unit, block, way) for way in (False, True))
    assert direct is None or transposed is None
    found = direct if transposed is None else transposed
    assert found is not None
    return found


def _sum(truth: Truth, unit: Unit, block: Any) -> Tensor:
    """A₁ ⊗ G₁ + A₂ ⊗ G₂, from uses s = V ā and s = Vᵀ ā."""
    direct = _product(truth, unit, block.direct, False)
    transposed = _product(truth, unit, block.transposed, True)
    assert direct is not None
    assert transposed is not None
    return direct + transposed


def _product(truth: Truth, unit: Unit, block: KroneckerBlock, transposed: bool) -> Tensor | None:
    a, g = truth.uses(unit, transposed)
    if not a:
        return None
    if block.sharing == "reduce":
        places = sum(x.shape[1] for x in a)
        a = [torch.stack([x.sum(dim=1) for x in a]).sum(dim=0) / places]
        g = [[torch.stack([y.sum(dim=1) for y in uses]).sum(dim=0)] for uses in g]
    rows = torch.cat([x.flatten(0, -2) for x in a])
    mean, total = rows.mT @ rows / len(rows), torch.zeros(())
    for y in (y.flatten(0, -2) for uses in g for y in uses):
        total = total + y.mT @ y
    A, G = (total, mean) if transposed else (mean, total)
    A = torch.diag(A.diagonal()) if block.diagonal_inputs else A
    G = torch.diag(G.diagonal()) if block.diagonal_grads else G
    return torch.kron(A, G)


def _dense(truth: Truth, unit: Unit, block: Block) -> Tensor:
    """The Fisher's own block, with zeros between pieces of neighbouring rows."""
    assert isinstance(block, DenseBlock)
    rows, columns = unit.shape
    pieces = min(-(-rows * columns // block.limit), rows)
    each = -(-rows // pieces)
    piece = (torch.arange(rows) // each).repeat(columns)
    v = truth.vectors(unit)
    return (v.mT @ v) * (piece[:, None] == piece)


def _diagonal(truth: Truth, unit: Unit, block: Block) -> Tensor:
    return torch.diag(truth.vectors(unit).square().sum(dim=0))


DEFINITIONS: dict[str, Callable[[Truth, Unit, Any], Tensor]] = {
    "KroneckerBlock": _kronecker,
    "KroneckerSumBlock": _sum,
    "DenseBlock": _dense,
    "DiagonalBlock": _diagonal,
}


# --------------------------------------------------------------------------------------------- layers


class OwnLinear(nn.Module):
    """A user's own layer, with `F.linear`."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class OwnProduct(nn.Module):
    """A user's own layer, with a weight stored as (in, out)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Positions(nn.Module):
    """Positions of a sequence, added to it."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, length, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


TRANSPOSED = (nn.Embedding, nn.EmbeddingBag, OwnProduct, Positions)
"""Modules that compute s = Vᵀ ā."""


def _inputs(call: Call, unit: Unit, examples: int) -> Tensor:
    """ā, (examples, places, features): what the weight is multiplied with, and ones for the bias."""
    by_name = {id(p): name for name, p in call.module.named_parameters(recurse=False)}
    columns = weight_columns(call.module, call.x, examples)
    parts = [
        torch.ones_like(columns[..., :1]) if by_name[id(p)] == "bias" else columns
        for p in unit.parameters
    ]
    return torch.cat(parts, dim=-1)


def _outputs(call: Call, g: Tensor, examples: int) -> Tensor:
    """g, (examples, places, features)."""
    if isinstance(call.module, CONVOLUTIONS):
        return g.flatten(2).mT
    if isinstance(call.module, nn.EmbeddingBag):
        return g.unsqueeze(1).expand(-1, call.x.shape[1], -1)
    return _by_example(g, examples)


def _by_example(x: Tensor, examples: int) -> Tensor:
    """(examples, places, features); a sequence may have time first, but another length."""
    if len(x) != examples:
        x = x.transpose(0, 1)
    assert len(x) == examples
    return x.reshape(examples, -1, x.shape[-1])


CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def weight_columns(module: nn.Module, x: Tensor, examples: int) -> Tensor:
    """What the weight is multiplied with, (examples, places, features)."""
    if isinstance(module, CONVOLUTIONS):
        return _patches(module, x)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        hot = functional.one_hot(x, module.num_embeddings).to(module.weight.dtype)
        if module.padding_idx is not None:
            hot = hot * (x != module.padding_idx).unsqueeze(-1)
        if isinstance(module, nn.EmbeddingBag) and module.mode == "mean":
            hot = hot / hot.sum(dim=(1, 2), keepdim=True).clamp(min=1)
        return _by_example(hot, examples)
    if isinstance(module, Positions):
        return torch.eye(x.shape[1]).to(x).expand(len(x), -1, -1)
    return _by_example(x, examples)


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """Patches by the convolution itself, with an identity in place of the weight."""
    assert module.groups == 1
    kernel = module.weight.shape[2:]
    width = module.in_channels * kernel.numel()
    eye = torch.eye(width).to(x)
    transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    with torch.no_grad():
        if transposed:
            weight = eye.view(module.in_channels, *kernel, width).movedim(-1, 1)
            dims = len(kernel)
            function = getattr(functional, f"conv_transpose{dims}d")
            options = (module.stride, module.padding, module.output_padding, 1, module.dilation)
            patches = function(x, weight, None, *options)
        else:
            patches = module._conv_forward(x, eye.view(width, module.in_channels, *kernel), None)
    return patches.flatten(2).mT

"""uᵀFv for a few vectors from their J v alone [MG15 App. C].

F = c E[Jᵀ F_R J], so uᵀFv = c E[(Ju)ᵀ F_R (Jv)]: one forward-mode pass that carries all directions
along, and no backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kronfac.layers import Layer, Matrices
from kronfac.likelihoods import Likelihood
from kronfac.minibatch import Batch, Call


def fisher_gram(
    model: nn.Module,
    layers: Sequence[Layer],
    likelihood: Likelihood,
    rows: Batch,
    case_weight: float,
    directions: Sequence[Matrices],
) -> Tensor:
    """The matrix of v_iᵀ F v_j for all pairs of directions, (k, k), float64, on the device."""
    parameters, tangents = {}, {}
    for i, layer in enumerate(layers):
        split = [layer.split(V[i]) for V in directions]
        for j, name in enumerate(layer.parameter_names()):
            parameters[name] = layer.parameters()[j].detach()
            tangents[name] = torch.stack([parts[j] for parts in split])
    gram = torch.zeros(
        len(directions), len(directions), dtype=torch.float64, device=directions[0][0].device
    )
    for call in rows.calls:
        outputs, Jv = _outputs_and_tangents(model, call, parameters, tangents)
        FJv = likelihood.fisher_product(outputs, Jv)
        gram += torch.einsum("ico,jco->ij", Jv, FJv).double()
    # Symmetric up to rounding: F_R is applied to one side only.
    return (gram + gram.mT) * (case_weight / (2 * rows.cases))


def _outputs_and_tangents(
    model: nn.Module, call: Call, parameters: dict[str, Tensor], tangents: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """f(x, θ) (rows, outputs) and J v for every direction (k, rows, outputs)."""

    def forward(values: dict[str, Tensor]) -> Tensor:
        return call.run(model, values)

    def pushforward(direction: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        primal, tangent, *_ = torch.func.jvp(forward, (parameters,), (direction,))
        return primal, tangent

    # The primal pass does not depend on the direction, so vmap runs it once for all.
    outputs, Jv = torch.func.vmap(pushforward, out_dims=(None, 0), randomness="same")(tangents)  # type: ignore[arg-type]
    return outputs.detach(), Jv.detach()

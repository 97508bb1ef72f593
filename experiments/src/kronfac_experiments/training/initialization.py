"""The sparse initialisation of Martens (2010), which the experiments start from [MG15 §13].

Weights are (out, in): a row holds the incoming weights of one unit.
"""

from typing import TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@torch.no_grad()
def sparse_(
    module: ModuleT, connections: int = 15, generator: torch.Generator | None = None
) -> ModuleT:
    """Give every unit of every `nn.Linear` a few random incoming weights, in place.

    W[i, j_c] ~ N(0, 1) for c = 1 … `connections`, with j_c uniform over the inputs; all other
    weights and all biases are 0. The j_c are drawn with replacement and of duplicates the last
    counts, as in the authors' program: a unit may get fewer than `connections` weights, and it is
    no error for a layer to have fewer inputs than that.

    Args:
        module: A linear layer, or a model; its layers are drawn in the order of `modules()`.
        connections: Draws per unit.
        generator: Source of the draws; PyTorch's global one when None. They are made in float32
            on the generator's device, so a seed means the same weights for every device and dtype.

    Returns:
        The module itself.
    """
    if connections < 1:
        raise ValueError(
            f"sparse_ needs at least one connection per unit, got connections={connections}."
        )
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError(
            f"sparse_ initialises nn.Linear layers, and {type(module).__name__} holds none. "
            "Pass a model with linear layers."
        )
    device = torch.device("cpu") if generator is None else generator.device
    for layer in layers:
        draws = (layer.out_features, connections)
        columns = torch.randint(layer.in_features, draws, generator=generator, device=device)
        values = torch.randn(draws, generator=generator, device=device, dtype=torch.float32)
        columns, values = columns.to(layer.weight.device), values.to(layer.weight)
        layer.weight.zero_()
        # One connection at a time: `scatter_` leaves open which of two duplicates wins.
        for column, value in zip(columns.split(1, 1), values.split(1, 1), strict=True):
            layer.weight.scatter_(1, column, value)
        if layer.bias is not None:
            layer.bias.zero_()
    return module

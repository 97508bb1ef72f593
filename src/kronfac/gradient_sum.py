"""The gradients of all ranks, on their way to a sum while the ranks go on with their own statistics."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from kronfac.distributed import Ranks
from kronfac.network import Matrices, Network, Unit


class GradientSum:
    """Σ_r share_r ∇h_r over the ranks r, from the gradients that a rank has in its parameters now.

    To be made before a message and started right after it.

    Args:
        world: the ranks.
        network: whose units they are; all ranks have the same.
        fresh: whether the gradient in a parameter is one of this mini-batch; else it counts as 0.
    """

    def __init__(
        self, world: Ranks, network: Network, fresh: Callable[[nn.Parameter], bool]
    ) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Unit]] = {}
        for unit in network.units:
            kinds.setdefault((unit.dtype, unit.parameters[0].device), []).append(unit)
        self._flats: list[Tensor] = []
        self._places: dict[nn.Parameter, tuple[Unit, int, int, int]] = {}
        """By the first parameter of a unit: the unit, its flat tensor, where it starts there, and where it
        says whether there is a gradient."""
        for number, units in enumerate(kinds.values()):
            joined = [_joined(unit, fresh).reshape(-1) for unit in units]
            # Behind the gradients, a 1 for every unit that has one: what is above 0 in the sum has one.
            whole = [float(all(map(fresh, unit.parameters))) for unit in units]
            flat = torch.cat([*joined, joined[0].new_tensor(whole)])
            start, end = 0, flat.numel() - len(units)
            for n, (unit, V) in enumerate(zip(units, joined, strict=True)):
                self._places[unit.parameters[0]] = (unit, number, start, end + n)
                start += V.numel()
            self._flats.append(flat)
        self._reduction = world.prepare(self._flats)

    def start(self, share: float) -> None:
        """Send this rank's gradients, with its share of the objective."""
        self._reduction.start(share)

    @cached_property
    def _arrived(self) -> list[Tensor]:
        self._reduction.wait()
        return self._flats

    def matrices(self, network: Network) -> Matrices:
        """The sums, unit by unit, not to be written to; waits for them."""
        flats, found = self._arrived, []
        for unit in network.units:
            then, number, start, _ = self._places[unit.parameters[0]]
            rows, columns = then.shape
            V = flats[number][start : start + rows * columns].view(rows, columns)
            # Of one layout on all ranks: products with another one are rounded in another way.
            found.append(V if unit.shape == then.shape else unit.join(then.split(V)).contiguous())
        return tuple(found)

    def has_gradient(self, unit: Unit) -> bool:
        """Whether any rank has a gradient in all parameters of a unit."""
        _, number, _, flag = self._places[unit.parameters[0]]
        return bool(self._arrived[number][flag] > 0)


def _joined(unit: Unit, fresh: Callable[[nn.Parameter], bool]) -> Tensor:
    """V of the gradients, zeros where there is none."""
    return unit.join(
        [
            p.grad if p.grad is not None and fresh(p) else torch.zeros_like(p)
            for p in unit.parameters
        ]
    )

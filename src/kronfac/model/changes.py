"""Changes of the model since K-FAC was made, or since its last step, that a step can't be made with."""

import torch

from kronfac.errors import UnsupportedModelError
from kronfac.model.find import refuse_dtypes
from kronfac.model.network import Network


def refuse_changes(network: Network) -> None:
    """Refuse what a step can't be made with; it may have come after the units were found.

    Raises:
        UnsupportedModelError: a unit is frozen or no longer in the model, or has moved to another dtype or
            device since the last step.
    """
    present = {id(p) for p in network.model.parameters()}
    gone = [
        name
        for unit in network.units
        for name, p in zip(unit.names, unit.parameters, strict=True)
        if id(p) not in present
    ]
    if gone:
        raise UnsupportedModelError(
            "KFAC trains the parameters that the model had when this KFAC was made; "
            f"{', '.join(map(repr, gone))} no longer belong to it: a layer was replaced or removed. Make a "
            "new KFAC after changing the model."
        )
    refuse_dtypes(network.units)
    before = network.learned.placement
    if before is not None and before != (now := network.placement):
        (old, new) = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
        raise UnsupportedModelError(
            "KFAC's statistics and momentum are where the parameters were in the last step, "
            f"{_say(old)}; the model has been moved to {_say(new)} since. Move it before KFAC is made, or "
            "load optimizer.state_dict() into a new KFAC, or into this one, after the move."
        )
    for unit in network.units:
        if not all(p.requires_grad for p in unit.parameters):
            raise UnsupportedModelError(
                f"{unit.name!r} has been frozen since this KFAC was made, which trains it; make a new one "
                "after changing the model."
            )


def _say(place: tuple[torch.dtype, torch.device]) -> str:
    dtype, device = place
    return f"{dtype} on {device}"


class ParameterVersions:
    """Notices writes to the parameters between two steps; a write through `p.data` leaves no mark."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, int]] | None = None

    def note(self, network: Network) -> None:
        """Remember the parameters as they are now."""
        self._noted = _versions(network)

    def forget(self) -> None:
        """Accept any parameters: a state was loaded."""
        self._noted = None

    def changed(self, network: Network) -> bool:
        """Whether anything was written to the parameters since then, or their memory was replaced."""
        return self._noted is not None and self._noted != _versions(network)


def _versions(network: Network) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in network.parameters]

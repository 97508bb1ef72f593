"""An optimizer's whole state in a checkpoint of `torch.distributed.checkpoint`.

Torch's loader fills in only tensors whose names and shapes a new optimizer already has. A new K-FAC has
none before its first step. So here the state is one entry of bytes, found by its name.
"""

import io
from typing import Any

import torch
from torch.optim import Optimizer

from kronfac.errors import StateError

ENTRY = "whole"


class WholeState:
    """All of `optimizer.state_dict()` as one entry, to be saved and loaded on any number of processes.

    A `Stateful` of `torch.distributed.checkpoint`. All ranks have the same state, and one of them writes
    it. The bytes are read with `torch.load(weights_only=True)`; torch itself reads what is around them with
    pickle, so load only what you trust.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": model.state_dict(), "optimizer": WholeState(optimizer)}
        >>> dcp.save(state, checkpoint_id="checkpoint")
        >>> dcp.load(state, checkpoint_id="checkpoint")

    Args:
        optimizer: A `KFAC`, or any optimizer whose ranks have equal states.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The one entry."""
        buffer = io.BytesIO()
        torch.save(self._optimizer.state_dict(), buffer)
        return {ENTRY: buffer.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the optimizer into the state that was saved.

        Raises:
            StateError: it is not what `state_dict` gave, or of another model.
        """
        saved = state.get(ENTRY) if isinstance(state, dict) else None
        if not isinstance(saved, bytes):
            raise StateError(
                f"WholeState loads what WholeState saved, the entry {ENTRY!r} of bytes; got "
                f"{type(saved).__name__}. Load it as it was saved."
            )
        device = self._optimizer.param_groups[0]["params"][0].device
        try:
            found = torch.load(io.BytesIO(saved), weights_only=True, map_location=device)
        except Exception as error:  # of many kinds, depending on which byte is wrong
            raise StateError(f"WholeState got damaged bytes: {error}") from error
        self._optimizer.load_state_dict(found)

"""Copies of an optimizer, shallow, deep or pickled: made anew from model, loss and settings."""

from typing import TYPE_CHECKING, Any

from torch import nn

from kronfac.transitions import SteppingOptimizer


class CopyingOptimizer(SteppingOptimizer):
    """An optimizer whose copies go on as it would."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module that holds its own optimizer is not complete yet when that is copied.
        if _complete(state["model"]):
            self._restore(state)
        else:
            self.__dict__["_saved"] = state

    if not TYPE_CHECKING:  # or every attribute would be thought to exist

        def __getattr__(self, name: str) -> Any:
            """Finish a copy when it is first used; only what an optimizer does not have leads here."""
            if "_saved" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
            self._restore(self.__dict__.pop("_saved"))
            return getattr(self, name)

    def _restore(self, state: dict[str, Any]) -> None:
        """Become what `__getstate__` described."""
        raise NotImplementedError


def _complete(module: nn.Module) -> bool:
    """Whether a module has been copied, all that is in it included."""
    modules = vars(module).get("_modules")
    return modules is not None and all(_complete(m) for m in modules.values() if m is not None)

"""Does a network train with the defaults?"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC, plan
from kronfac.extend import DiagonalBlock

STEPS, FEW = 50, 15
"""What a network may take for half of its initial loss; and what the smallest ones take, to save time."""
VOCABULARY, CLASSES = 37, 4
PADDING = -100
"""The label that cross-entropy ignores."""


class _CalledError(Exception):
    """Stops a model before it computes anything."""


def example_of(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Any] | tuple[Any, ...]:
    """What a loss calls the model with, which does not run."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CalledError(args, kwargs)

    handle = model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        loss()
    except _CalledError as called:
        args, kwargs = called.args
        return (
            dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
            if kwargs
            else args
        )
    finally:
        handle.remove()
    raise AssertionError("the model was not called")


def train(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> tuple[list[float], set[str]]:
    """The loss before every step, and the kinds of events: one data set, every default.

    The plan has to name all units that fall back to a diagonal block.
    """
    made = plan(model, nn.CrossEntropyLoss(), example_of(model, loss))
    planned = {row.name for row in made.fallbacks}
    optimizer = KFAC(model, nn.CrossEntropyLoss())

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    losses, events = [], set()
    for _ in range(steps):
        losses.append(float(optimizer.step(closure).detach()))
        events |= {event.kind.value for event in optimizer.report.events}
    units = optimizer.network.units
    diagonal = {u.name for u in units if isinstance(u.block, DiagonalBlock) or not u.observed}
    assert planned == diagonal
    return losses, events


def assert_trains(model: nn.Module, loss: Callable[[], Tensor], steps: int = STEPS) -> None:
    """At most half of the initial loss, every parameter moved, no fallback that was not planned.

    Warnings are errors here.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, events = train(model, loss, steps)
    # Two on average: dropout masks differ from step to step.
    assert sum(losses[-2:]) / 2 <= losses[0] / 2, losses[:: max(steps // 10, 1)]
    assert_moved(model, before)
    assert events <= {"rejected"}


def assert_moved(model: nn.Module, before: dict[str, Tensor]) -> None:
    """No parameter is as it was."""
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not unchanged


def tokens(examples: int, length: int = 10) -> Tensor:
    """Sequences of a few words each; 0, 1, 2 are left to padding, beginnings and ends."""
    return torch.randint(3, VOCABULARY, (examples, length))


def padded(ids: Tensor) -> dict[str, Tensor]:
    """A batch whose second half is shorter, as a language model takes it."""
    mask = torch.ones_like(ids)
    mask[len(ids) // 2 :, 2 * ids.shape[1] // 3 :] = 0
    ids = ids.where(mask == 1, torch.zeros_like(ids))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, PADDING),
    }


def images(examples: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Noise with a bright corner, and which of the four corners that is."""
    x, corner = torch.randn(examples, 3, size, size), torch.arange(examples) % CLASSES
    half = size // 2
    for image, c in zip(x, corner.tolist(), strict=True):
        image[:, c // 2 * half :, c % 2 * half :][:, :half, :half] += 1.0
    return x, corner

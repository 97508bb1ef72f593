"""One call of the model with an example, recorded as a closure would be, and nothing left of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.errors import ExampleError, KronfacError
from kronfac.network import Batch, Network, RandomState, record, replay, restore
from kronfac.network.nested import tensors_of
from kronfac.precision import Context


@contextmanager
def untouched(network: Network) -> Iterator[None]:
    """Buffers and random numbers are afterwards as they were before."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in network.model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with replay(RandomState.current(network.device)):
            yield
    finally:
        # Only what was written to: graphs that others have made of the rest stay valid.
        restore(
            [
                (module, name, buffer, value)
                for module, name, buffer, value in kept
                if module._buffers.get(name) is not buffer or not _same(buffer, value)
            ]
        )


def _same(buffer: Tensor, value: Tensor) -> bool:
    if buffer.is_meta:
        return True  # without storage there is nothing to write to
    return buffer.shape == value.shape and bool(torch.eq(buffer, value).all())


def record_example(
    model: nn.Module, network: Network, example: Any, targets: Any, callers: Context
) -> Batch:
    """What a closure would be recorded as that calls the model with this example.

    The loss is that of these targets, or else the one that the model computes itself; without either, its
    curvature at the model's outputs.

    Args:
        model: to be called; `network.model` is what is inside, if that is compiled.
        network: what is trained.
        example: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        targets: of the loss; None if the model computes its loss itself, or they are not known.
        callers: the context that the model is to be called in, see `precision.py`.

    Raises:
        ExampleError: the model can't be called so, or what it returns does not fit the loss.
    """
    args, kwargs = _arguments(example)
    if network.device.type == "meta":
        targets = None  # weights of terms would be asked for their values
    with record(model, network.objective, network.buffers) as recording, torch.enable_grad():
        with callers():
            try:
                outputs = model(*args, **kwargs)
            except Exception as error:
                raise ExampleError(
                    "kronfac.plan calls the model with the example, as training does: a tensor, a tuple of "
                    f"arguments or a dict of keyword arguments. {type(model).__name__} got "
                    f"{_described(example)} and raised {type(error).__name__}: {error}. Pass what you call "
                    "the model with."
                ) from error
            loss = _loss(network, outputs, targets, seen=bool(recording.losses))
        if loss is not None and loss.requires_grad:
            # For the gradients that arrive at the loss calls; none are left in the parameters.
            torch.autograd.grad(loss, network.parameters, allow_unused=True)
    try:
        return recording.batch()
    except KronfacError as error:
        raise ExampleError(
            "kronfac.plan needs an example whose outputs have gradients, and a loss that fits them; "
            f"{type(model).__name__} got {_described(example)}. {error} Pass what you call the model with, "
            "and targets."
        ) from error


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if type(example) is tuple else (example,)), {}


def _loss(network: Network, outputs: Any, targets: Any, *, seen: bool) -> Tensor | None:
    """The loss of the outputs; that of a model that computes it itself is the first single number."""
    if targets is None:
        single = (t for t in tensors_of(outputs) if t.numel() == 1 and t.requires_grad)
        return next(single, None) if seen else None
    try:
        return network.objective.loss(outputs, targets).sum()
    except Exception as error:
        raise ExampleError(
            f"kronfac.plan calls {type(network.objective.module).__name__} with the model's outputs and "
            f"the targets; it got {_described(outputs)} and {_described(targets)} and raised "
            f"{type(error).__name__}: {error}. Pass targets that fit, or none."
        ) from error


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(value))
    kind = type(value).__name__
    return f"a {kind} with tensors {shapes}" if shapes else f"a {kind}"

"""K-FAC prepared by Accelerate: the steps of a plain loop, in full and in half precision."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from tests.integrations.language import BATCH, assert_same, batches, model, rows

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _no_state_is_left() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process, the Trainer's among them."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerated(network: nn.Module, epochs: int, precision: str, micro_batches: int) -> KFAC:
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=micro_batches
    )
    own = KFAC(network, nn.CrossEntropyLoss())
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
    prepared, optimizer, loader = accelerator.prepare(network, own, loader)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return own


def plain(network: nn.Module, epochs: int, precision: str, micro_batches: int) -> None:
    optimizer = KFAC(network, nn.CrossEntropyLoss())
    half = precision == "bf16"
    for _ in range(epochs):
        for n, batch in enumerate(batches(), start=1):
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                loss = network(**batch).loss
            (loss / micro_batches).backward()
            if n % micro_batches == 0:
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("precision", "micro_batches"),
    [
        ("no", 2),
        pytest.param("no", 1, marks=pytest.mark.slow),
        pytest.param("bf16", 1, marks=pytest.mark.slow),
        pytest.param("bf16", 2, marks=pytest.mark.slow),
    ],
)
def test_it_takes_the_steps_of_a_plain_loop(precision, micro_batches):
    one, other = model(), model()
    accelerated(one, 1, precision, micro_batches)
    plain(other, 1, precision, micro_batches)
    assert_same(one, other)


@pytest.mark.slow
def test_a_closure_is_passed_on():
    network = model()
    (batch, *_) = batches()
    own = KFAC(network, nn.CrossEntropyLoss())
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(network, own)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = prepared(**batch).loss
        accelerator.backward(loss)
        return loss

    losses = []
    for _ in range(5):
        optimizer.step(closure)
        losses.append(own.report.loss)
    assert losses[-1] < losses[0]

"""An exception at any operation of a step, or a signal at any line, leaves everything as it was."""

import random
import signal
import threading
from contextlib import suppress

import pytest
import torch

from kronfac import GammaSearch, Intervals, LevenbergMarquardtRule
from tests.failures.injection import AtOperation, Everything, Injected, Run, SignalAtLine, raising

SEARCHING = {
    "damping": LevenbergMarquardtRule(0.5, interval=2),
    "gamma": GammaSearch(interval=6),
    "intervals": Intervals(inverse_interval=3),
}
# The first step searches λ₀; the second measures ρ and refreshes; a step with a rejection comes below.
CASES = [
    ("perceptron", "own", 0, {}),
    ("perceptron", "own", 3, {}),
    ("perceptron", "loop", 2, {"inverse": "block_tridiagonal"}),
    ("convolutional", "closure", 0, {}),
    ("convolutional", "closure", 2, {"inverse": "ekfac"}),
    ("convolutional", "loop", 0, {}),
    ("convolutional", "loop", 2, {"weight_decay": 1e-3, "lr": 0.5}),
    ("lstm", "loop", 1, {}),
    # γ is searched for by the objective, and ρ is measured.
    ("perceptron", "closure", 5, SEARCHING),
    ("perceptron", "own", 5, SEARCHING | {"inverse": "block_tridiagonal"}),
    # The step before is rolled back, and with a closure another one is computed.
    ("perceptron", "own", 1, {"lr": 20.0}),
    ("convolutional", "closure", 1, {"lr": 20.0}),
    ("convolutional", "loop", 1, {"lr": 20.0}),
]


def wanted(some: int) -> pytest.MarkDecorator:
    """At some places of a step, and in slow tests at many."""
    return pytest.mark.parametrize("wanted", [some, pytest.param(200, marks=pytest.mark.slow)])


def points(count: int, wanted: int, seed: str) -> list[int]:
    """The first and the last few, where states change hands, and some in between."""
    chosen = random.Random(seed)
    ends = {1, 2, 3, *range(count - 5, count + 1)}
    inner = chosen.sample(range(1, count + 1), min(wanted, count))
    return sorted({n for n in (*ends, *inner) if 1 <= n <= count})


def operations(problem, way, steps, settings) -> int:
    """How many a step takes that has been tried before: it knows which buffers the model writes to."""
    first, again = (Run.of(problem, way, steps, **settings) for _ in range(2))
    with AtOperation() as counter:
        first.step()
    with suppress(Injected), AtOperation(counter.count - 20):
        again.step()
    with AtOperation() as counter:
        again.step()
    return counter.count


def assert_all_or_nothing_at_operations(problem, way, steps, settings, wanted) -> None:
    count = operations(problem, way, steps, settings)
    run, untroubled = (Run.of(problem, way, steps, **settings) for _ in range(2))
    start = torch.get_rng_state()
    before = Everything.of(run.optimizer, gradients=way == "loop")
    raised = 0
    for n in points(count, wanted, f"{problem} {way} {steps}"):
        try:
            with AtOperation(n):
                run.step()
        except Injected:
            raised += 1
            before.assert_kept(run.optimizer)
        else:
            raise AssertionError(f"operation {n} of {count} raised nothing")
    assert raised >= 8
    run.step()
    assert run.optimizer.report.rejected == (settings.get("lr") == 20)
    torch.set_rng_state(start)
    untroubled.step()
    run.assert_same(untroubled)


@wanted(8)
@pytest.mark.parametrize(("problem", "way", "steps", "settings"), CASES)
def test_an_exception_at_any_operation(problem, way, steps, settings, wanted):
    assert_all_or_nothing_at_operations(problem, way, steps, settings, wanted)


def test_gradients_that_a_grad_scaler_has_scaled_are_scaled_again():
    def scaled() -> tuple[torch.amp.GradScaler, Run]:
        run = Run.of("perceptron", "loop", 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0)  # no power of 2: division rounds
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.optimizer.model, *run.batches[-1])).backward()
        return scaler, run

    (scaler, run), (other, untroubled) = scaled(), scaled()
    before = Everything.of(run.optimizer, gradients=True)
    for n in (20, 100):
        with pytest.raises(Injected), AtOperation(n):
            scaler.step(run.optimizer)
        before.assert_kept(run.optimizer)
    scaler.step(run.optimizer)
    other.step(untroubled.optimizer)
    run.assert_same(untroubled)


def test_a_closure_that_ends_a_loop_leaves_the_gradients_before_it():
    run = Run.of("perceptron", "loop", 1)
    before = Everything.of(run.optimizer, gradients=True)

    def closure() -> torch.Tensor:
        value = run.loss(run.optimizer.model, *run.batches[0])
        value.backward()
        raise Injected

    with pytest.raises(Injected):
        run.optimizer.step(closure)
    before.assert_kept(run.optimizer)


# ------------------------------------------------------------------------------------------- signals


def assert_all_or_nothing_at_lines(problem, way, steps, wanted) -> None:
    counted = Run.of(problem, way, steps)
    with SignalAtLine() as counter:
        counted.step()
    count = counter.count
    run, untroubled = (Run.of(problem, way, steps) for _ in range(2))
    start = torch.get_rng_state()
    with raising(signal.SIGINT, Injected):
        before = Everything.of(run.optimizer, gradients=way == "loop")
        for n in points(count, wanted, f"{problem} {way} {steps} lines"):
            # The last lines are those after the step: it may have been taken.
            with suppress(Injected), SignalAtLine(n):
                run.step()
            if run.optimizer.report is not before.report:
                assert n > count - 150, f"the signal at line {n} of {count} was lost"
                break
            before.assert_parameters_and_state_kept(run.optimizer)
        else:
            run.step()
    torch.set_rng_state(start)
    untroubled.step()
    run.assert_same(untroubled)


@wanted(6)
@pytest.mark.parametrize(
    ("problem", "way", "steps"),
    [("perceptron", "own", 3), ("convolutional", "closure", 0), ("convolutional", "loop", 2)],
)
def test_a_signal_at_any_line(problem, way, steps, wanted):
    assert_all_or_nothing_at_lines(problem, way, steps, wanted)


@pytest.mark.parametrize("function", ["paused", "full_precision"])
def test_a_signal_in_a_context_manager_leaves_the_recorder_on(function):
    """Also between what it changes and the `try` that puts it back."""
    counted = Run.of("perceptron", "loop", 1)
    with SignalAtLine(function=function) as counter:
        counted.step()
    assert counter.count > 2
    run = Run.of("perceptron", "loop", 1)
    before = Everything.of(run.optimizer, gradients=True)
    for n in range(1, counter.count + 1):
        with (
            raising(signal.SIGINT, Injected),
            suppress(Injected),
            SignalAtLine(n, function=function),
        ):
            run.step()
        if run.optimizer.report is not before.report:
            break
        before.assert_kept(run.optimizer)


def test_ctrl_c_in_a_closure_does_not_wait():
    run = Run.of("perceptron", "closure", 1)
    reached = []

    def closure():
        signal.raise_signal(signal.SIGINT)
        reached.append(True)

    # As in a terminal: of a command in the background the signal would be ignored.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = Everything.of(run.optimizer)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step(closure)
        assert not reached
        before.assert_kept(run.optimizer)
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_handler_that_does_not_raise_is_called_once_and_the_step_is_taken():
    run, untroubled = Run.of("perceptron", "loop", 2), Run.of("perceptron", "loop", 2)
    calls = []
    former = signal.signal(signal.SIGINT, lambda *given: calls.append(given))
    try:
        with SignalAtLine(200):
            run.step()
    finally:
        signal.signal(signal.SIGINT, former)
    assert len(calls) == 1
    untroubled.step()
    run.assert_same(untroubled)


def test_steps_in_other_threads_leave_signals_alone():
    run, seen = Run.of("perceptron", "own", 1), []
    former = signal.getsignal(signal.SIGINT)

    def look(module, *given):
        seen.append(signal.getsignal(signal.SIGINT))

    run.optimizer.model.register_forward_hook(look)
    thread = threading.Thread(target=run.step)
    thread.start()
    thread.join()
    assert {*seen} == {former}
    assert seen

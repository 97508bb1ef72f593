"""Reports: what they say, where they are logged, and the warnings of refused and rejected steps."""

import copy
import logging
import math
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, EventKind, RawStep, StepReport, log_to
from kronfac.report import REJECTED_BY, SETTLING, Event, EventWarnings


def test_kinds_of_events_are_strings():
    assert kronfac.EventKind is EventKind
    assert [str(kind) for kind in EventKind] == [
        "refused",
        "rejected",
        "refresh_failed",
        "block_failed",
        "candidate_failed",
        "nonfinite_loss",
        "nonfinite_gradient",
        "nonfinite_statistics",
        "nonfinite_step",
        "block_damped",
        "block_plain",
        "out_of_memory",
        "loss_not_seen",
    ]
    assert all(kind == kind.value and EventKind(kind.value) is kind for kind in EventKind)
    assert f"{EventKind.REJECTED}: why" == "rejected: why"
    assert EventKind.REJECTED in {"rejected": 1}
    assert EventKind.REJECTED != "refused"
    assert EventKind.REJECTED != EventKind.REFUSED
    for copied in (copy.deepcopy(EventKind.REFUSED), pickle.loads(pickle.dumps(EventKind.REFUSED))):
        assert copied is EventKind.REFUSED


def test_a_report_says_what_happened():
    rejected = StepReport(3, 1.0, 1.0, 1.0, events=(Event(EventKind.REJECTED, ""),))
    refused = StepReport(3, 1.0, 1.0, 1.0, events=(Event(EventKind.REFUSED, ""),))
    assert (rejected.rejected, rejected.refused) == (True, False)
    assert (refused.rejected, refused.refused) == (False, True)


# -------------------------------------------------------------------------------------------- logging


def setup() -> tuple[KFAC, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(64, 3)
    return KFAC(model, nn.MSELoss()), x, x.prod(dim=1, keepdim=True)


class Run:
    """The interface of a Weights & Biases run."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        self.logged.append((data, step))


def test_tensorboard_has_the_numbers_of_every_step(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    optimizer, x, y = setup()
    reports = []
    with tensorboard.SummaryWriter(tmp_path) as writer:
        handle = log_to(optimizer, writer)
        for _ in range(4):
            optimizer.step(optimizer.closure(x, y))
            reports.append(optimizer.report)
        handle.remove()
        optimizer.step(optimizer.closure(x, y))
    events = loader.EventAccumulator(str(tmp_path)).Reload()
    for tag, field in (("kfac/loss", "loss"), ("kfac/lambda", "lambda_"), ("kfac/alpha", "alpha")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [1, 2, 3, 4]
        expected = [getattr(report, field) for report in reports]
        assert [value for _, value in found] == pytest.approx(expected, rel=1e-6)


def test_a_run_and_a_function_get_the_same():
    optimizer, x, y = setup()
    run, called = Run(), []
    log_to(optimizer, run, prefix="optimizer.")
    log_to(optimizer, lambda numbers, step: called.append((numbers, step)), prefix="optimizer.")
    for _ in range(3):
        optimizer.step(optimizer.closure(x, y))
    assert run.logged == called
    numbers, step = called[-1]
    report = optimizer.report
    assert step == report.iteration == 3
    assert numbers["optimizer.loss"] == report.loss
    assert numbers["optimizer.seconds"] == pytest.approx(sum(report.seconds.values()))
    assert numbers["optimizer.refused"] == numbers["optimizer.rejected"] == 0
    assert all(math.isfinite(value) for value in numbers.values())
    assert report.rho is None
    assert "optimizer.rho" not in numbers


def test_a_loop_without_a_closure_and_a_step_that_does_nothing():
    optimizer, x, y = setup()
    run = Run()
    log_to(optimizer, run)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # nothing to take a step from
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(optimizer.model(x), y)  # never differentiated
        optimizer.objective.module(optimizer.model(x), y).backward()
        optimizer.step()
    assert [step for _, step in run.logged] == [1, 2]


def test_a_logger(caplog):
    optimizer, x, y = setup()
    with caplog.at_level(logging.INFO, logger="training"):
        log_to(optimizer, logging.getLogger("training"))
        optimizer.step(optimizer.closure(x, y))
    assert caplog.messages[0].startswith(f"step 1: kfac/loss {optimizer.report.loss:.4g}, ")


def test_what_can_not_be_logged():
    optimizer, _, _ = setup()
    with pytest.raises(TypeError, match="target is a SummaryWriter"):
        log_to(optimizer, 3)
    with pytest.raises(TypeError, match="the report of a KFAC"):
        log_to(torch.optim.SGD(optimizer.model.parameters()), print)


# ------------------------------------------------------------------------------------------- warnings


def test_the_first_refused_step_warns():
    optimizer, x, y = setup()
    optimizer.step(optimizer.closure(x, y))
    run = Run()
    log_to(optimizer, run)
    bad = torch.full_like(y, torch.inf)
    with pytest.warns(
        UserWarning, match=r"KFAC refused a step at iteration 2: The loss is inf\."
    ) as w:
        optimizer.step(optimizer.closure(x, bad))
    assert w[0].filename == __file__
    assert run.logged[0][0]["kfac/refused"] == 1
    assert "kfac/loss" not in run.logged[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(optimizer.closure(x, bad))
        optimizer.step(optimizer.closure(x, y))


@pytest.mark.parametrize("own_closure", [True, False], ids=["closure", "loop"])
def test_the_third_rejected_step_of_ten_warns(own_closure):
    optimizer, x, y = setup()
    sensible = optimizer.settings

    def step() -> None:
        if own_closure:
            optimizer.step(optimizer.closure(x, y))
            return
        optimizer.zero_grad()
        optimizer.objective.module(optimizer.model(x), y).backward()
        optimizer.step()

    def reject() -> None:
        """A step that is far too long, and one that finds that out."""
        optimizer.settings = replace(sensible, step_rule=RawStep(50.0))
        step()
        optimizer.settings = sensible
        step()
        assert optimizer.report.rejected

    for _ in range(SETTLING):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reject()
        reject()
    with pytest.warns(UserWarning, match="KFAC rejected 3 of the last 10 steps") as given:
        reject()
    assert [w.filename for w in given] == [__file__]
    # All steps are on the same examples.
    assert "The loss rose on the very mini-batch" in str(given[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reject()


def told_of(rejected: list[bool], advice: str = "", first: int = SETTLING + 1) -> list[str]:
    """Warnings in a run with these rejections from iteration `first` on."""
    warn_of = EventWarnings()
    event = Event(EventKind.REJECTED, "It rose.", advice or REJECTED_BY["noise"])
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for k, was in enumerate(rejected, first):
            warn_of(StepReport(k, 1.0, 1.0, 1.0, events=(event,) if was else ()))
    return [str(warning.message) for warning in given]


def test_two_rejections_in_ten_steps_are_no_warning():
    assert not told_of([False, True, True] + 8 * [False] + [True, True])


def test_rejections_while_the_damping_settles_are_no_warning():
    assert not told_of(SETTLING * [True] + [True, True], first=1)
    assert told_of(SETTLING * [True] + [True, True, True], first=1)


def test_the_third_rejection_in_ten_steps_warns_once_in_two_sentences():
    (message,) = told_of([True, False, False, True, *(4 * [False]), True, True, True])
    assert message.startswith("KFAC rejected 3 of the last 10 steps, the latest at iteration 29. ")
    assert message.count(". ") == 1
    assert message.endswith(".")


@pytest.mark.parametrize("cause", REJECTED_BY)
def test_the_advice_fits_the_cause(cause):
    (message,) = told_of(3 * [True], REJECTED_BY[cause])
    assert ("shuffle" in message.lower()) == (cause == "noise")
    assert ("float64" in message) == (cause == "rounding")

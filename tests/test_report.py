import copy
import pickle
import warnings

import pytest

import kronfac
from kronfac import EventKind
from kronfac.report import REJECTED_BY, Event, EventWarnings, StepReport


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


def told_of(rejected: list[bool], advice: str = "") -> list[str]:
    """Warnings in a run with these rejections."""
    warn_of = EventWarnings()
    event = Event(EventKind.REJECTED, "It rose.", advice or REJECTED_BY["noise"])
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for k, was in enumerate(rejected, 1):
            warn_of(StepReport(k, 1.0, 1.0, 1.0, events=(event,) if was else ()))
    return [str(warning.message) for warning in given]


def test_two_rejections_in_ten_steps_are_no_warning():
    assert not told_of([False, True, True] + 8 * [False] + [True, True])


def test_the_third_rejection_in_ten_steps_warns_once_in_two_sentences():
    (message,) = told_of([True, False, False, True, *(4 * [False]), True, True, True])
    assert message.startswith("KFAC rejected 3 of the last 10 steps, the latest at iteration 9. ")
    assert message.count(". ") == 1
    assert message.endswith(".")


@pytest.mark.parametrize("cause", REJECTED_BY)
def test_the_advice_fits_the_cause(cause):
    (message,) = told_of(3 * [True], REJECTED_BY[cause])
    assert ("shuffle" in message.lower()) == (cause == "noise")
    assert ("float64" in message) == (cause == "rounding")

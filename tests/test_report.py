import copy
import pickle

import pytest

import kronfac
from kronfac import EventKind
from kronfac.report import SAME_EXAMPLES, Event, EventWarnings, StepReport


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
        "no_data",
        "dead_units",
        "constant_inputs",
        "batch_of_one",
        "zero_gradient",
        "parameters_changed",
        "loss_not_seen",
    ]
    assert all(kind == kind.value and EventKind(kind.value) is kind for kind in EventKind)
    assert f"{EventKind.REJECTED}: why" == "rejected: why"
    assert EventKind.REJECTED in {"rejected": 1}
    assert EventKind.REJECTED != "refused"
    assert EventKind.REJECTED != EventKind.REFUSED
    for copied in (copy.deepcopy(EventKind.REFUSED), pickle.loads(pickle.dumps(EventKind.REFUSED))):
        assert copied is EventKind.REFUSED


def test_the_old_name_of_a_rejection_still_works():
    assert EventKind("taken_back") is EventKind.REJECTED
    assert EventKind.REJECTED == "taken_back"
    assert "taken_back" == EventKind.REJECTED  # noqa: SIM300
    assert EventKind.REFUSED != "taken_back"
    with pytest.raises(ValueError, match="given_up"):
        EventKind("given_up")


def test_a_report_says_what_happened():
    rejected = StepReport(3, 1.0, 1.0, 1.0, events=(Event(EventKind.REJECTED, ""),))
    refused = StepReport(3, 1.0, 1.0, 1.0, events=(Event(EventKind.REFUSED, ""),))
    assert (rejected.rejected, rejected.refused) == (True, False)
    assert (refused.rejected, refused.refused) == (False, True)


def test_cases_is_the_deprecated_name_of_examples():
    report = StepReport(1, 1.0, 1.0, 1.0, examples=7)
    with pytest.warns(DeprecationWarning, match="examples"):
        assert report.cases == 7


@pytest.mark.parametrize("advice", ["", SAME_EXAMPLES])
def test_the_advice_to_shuffle_is_not_given_if_mini_batches_do_not_differ(advice: str):
    event = Event(EventKind.REJECTED, "It rose.", advice)
    with pytest.warns(UserWarning, match="It rose") as given:
        EventWarnings()(StepReport(3, 1.0, 1.0, 1.0, events=(event,)))
    (warning,) = given
    assert ("shuffle" in str(warning.message)) == (not advice)
    assert advice in str(warning.message)

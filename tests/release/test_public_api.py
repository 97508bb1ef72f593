"""Public names and signatures are as recorded, so that no release changes them unseen."""

import pytest

from tests.release.api_changes import (
    Bump,
    accepts_old_calls,
    bump_between,
    changes,
    needed,
)
from tests.release.public_api import MODULES, RECORDED, current

MEANING = """The public names of kronfac are not as recorded in tests/release/public_api.txt:

{changes}

What that needs, from version 1.0 on (before, one place lower: minor for major, patch for minor):
  major  something that worked may not, or may mean something else: removed, renamed, another default,
         a new argument without a default
  minor  something is new: added, or extended by arguments that have defaults
If it is meant: a line in CHANGELOG.md, then `python -m tests.release.public_api`. If not, undo it."""


def test_public_names_are_as_recorded():
    found = changes(RECORDED.read_text(), current())
    listed = "\n".join(f"  {change}" for change in found)
    assert not found, MEANING.format(changes=listed)


def test_the_record_has_the_front_door():
    record = RECORDED.read_text()
    assert "\nkronfac.KFAC (model, loss=None, *, " in record
    assert "\nkronfac.StepReport.iteration attribute\n" in record
    for module in MODULES:
        assert f"\n{module}." in record


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("(a)", "(a, b=1)", True),
        ("(a)", "(a, *, b=1)", True),
        ("(a, *, b=1)", "(a, b=1)", True),
        ("(a, *, b=1)", "(a, *, c=2, b=1)", True),
        ("(a)", "(a, /)", False),
        ("(a)", "(a=1)", True),
        ("(a)", "(a, b)", False),
        ("(a)", "(a, *, b)", False),
        ("(a, b=1)", "(a, b=2)", False),
        ("(a, b=1)", "(a, b)", False),
        ("(a, b)", "(b, a)", False),
        ("(a, b=1)", "(a, c=1, b=1)", False),
        ("(a, *, b=1)", "(a)", False),
        ("(a, *, b=1)", "(a, **other)", False),
        ("(*parts)", "(parts)", False),
        ("property", "(self)", False),
    ],
)
def test_a_signature_is_extended_if_old_calls_mean_the_same(old, new, expected):
    assert accepts_old_calls(old, new) is expected


@pytest.mark.parametrize(
    ("old", "new", "stable", "early"),
    [
        ("a (x)\n", "a (x)\n", Bump.PATCH, Bump.PATCH),
        ("a (x)\n", "a (x)\nb class\n", Bump.MINOR, Bump.PATCH),
        ("a (x)\n", "a (x, y=None)\n", Bump.MINOR, Bump.PATCH),
        ("a (x)\nb class\n", "a (x)\n", Bump.MAJOR, Bump.MINOR),
        ("a (x=1)\n", "a (x=2)\n", Bump.MAJOR, Bump.MINOR),
    ],
)
def test_the_version_that_a_change_needs(old, new, stable, early):
    assert needed(changes(old, new), (1, 2, 3)) == stable
    assert needed(changes(old, new), (0, 2, 3)) == early


def test_which_part_of_a_version_is_raised():
    assert bump_between((1, 2, 3), (2, 0, 0)) == Bump.MAJOR
    assert bump_between((1, 2, 3), (1, 3, 0)) == Bump.MINOR
    assert bump_between((1, 2, 3), (1, 2, 4)) == Bump.PATCH
    assert bump_between((1, 2, 3), (1, 2, 3)) is None


def test_a_change_says_what_it_is():
    (change,) = changes("kronfac.f (a)\n", "kronfac.f (a, b)\n")
    assert str(change) == ("kronfac.f: changed (major)\n      before: (a)\n      now:    (a, b)")

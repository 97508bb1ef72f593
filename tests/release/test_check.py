"""What keeps a release back."""

import pytest

from tests.release.changelog import NUMBERS
from tests.release.check import PLACES, change_faults, changes, name_faults, needed, previous_tag

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n\n### Added\n\n- A thing.\n"
REMOVED = changes("kronfac.f (a)\n", "")
ADDED = changes("", "kronfac.f (a)\n")


def test_a_release_that_keeps_all_rules():
    assert name_faults("v0.2.0", "0.2.0", CHANGELOG) == []
    assert change_faults("0.1.0", "0.2.0", REMOVED, False, CHANGELOG) == []
    assert change_faults("0.1.0", "0.1.1", ADDED, False, CHANGELOG) == []


def test_the_tag_is_the_version():
    (fault,) = name_faults("v0.3.0", "0.2.0", CHANGELOG)
    assert "The tag is v0.3.0" in fault


def test_the_changelog_has_the_version():
    (fault,) = name_faults("v0.3.0", "0.3.0", CHANGELOG)
    assert "nothing under '## [0.3.0]'" in fault


def test_a_removed_name_needs_more_than_a_patch():
    (fault,) = change_faults("0.1.0", "0.1.1", REMOVED, False, CHANGELOG)
    assert "- kronfac.f (a)" in fault
    (fault,) = change_faults("1.1.0", "1.2.0", REMOVED, False, CHANGELOG)
    assert "needs at least a major release" in fault


@pytest.mark.parametrize(
    ("old", "new", "stable", "early"),
    [
        ("# head\na (x)\n", "a (x)\n", "patch", "patch"),
        ("a (x)\n", "a (x)\nb class\n", "minor", "patch"),
        ("a (x)\nb class\n", "a (x)\n", "major", "minor"),
        ("a (x=1)\n", "a (x=2)\n", "major", "minor"),
    ],
)
def test_the_version_that_a_change_needs(old, new, stable, early):
    assert PLACES[needed(changes(old, new), (1, 2, 3))] == stable
    assert PLACES[needed(changes(old, new), (0, 2, 3))] == early


def test_a_version_goes_up():
    assert change_faults("0.2.0", "0.2.0", [], False, CHANGELOG)


def test_other_numbers_are_said():
    (fault,) = change_faults("0.1.0", "0.2.0", [], True, CHANGELOG)
    assert NUMBERS in fault
    said = f"{CHANGELOG}\n{NUMBERS}\n\n- Why.\n\nPinned trajectories: `0123456789ab`.\n"
    assert change_faults("0.1.0", "0.2.0", [], True, said) == []


def test_the_release_before():
    tags = ["v0.1.0", "v0.10.0", "v0.9.0", "v0.11.0", "very", "v1"]
    assert previous_tag(tags, "v0.11.0") == "v0.10.0"
    assert previous_tag(tags, "v0.1.0") is None

"""A change of the pinned trajectories is said in CHANGELOG.md, and all versions agree."""

import re

import pytest

import kronfac
from tests.release.changelog import NUMBERS, ROOT, digest, latest_digest, numbers, section, version
from tests.trajectories.runs import RECORDED

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
EARLIER = f"## [Unreleased]\n\n{NUMBERS}\n\n- Why.\n\nPinned trajectories: `0123456789ab`.\n\n## [0.1.0]\n"


def test_new_trajectories_come_with_a_line_in_the_changelog():
    found = digest(RECORDED.read_bytes())
    assert latest_digest(CHANGELOG) == found, (
        "tests/trajectories/recorded.json was recorded anew: training gives other numbers. Say which runs "
        f"and why in CHANGELOG.md under {NUMBERS!r}, with this as its last line:\n\n"
        f"Pinned trajectories: `{found}`."
    )


def test_the_newest_digest_counts():
    older = EARLIER.replace("0123456789ab", "ba9876543210").replace("Unreleased", "0.0.9")
    assert latest_digest(EARLIER + older) == "0123456789ab"


def test_a_digest_elsewhere_does_not_count():
    assert latest_digest(EARLIER.replace(NUMBERS, "### Fixed")) is None
    assert latest_digest(EARLIER.replace("Pinned", "### Fixed\n\nPinned")) is None


def test_another_record_has_another_digest():
    record = RECORDED.read_bytes()
    assert digest(record.replace(b"1", b"2", 1)) != digest(record)


def test_sections_are_found_by_version():
    text = "# Changelog\n\n## [Unreleased]\n\nnew\n\n## [0.2.0] - 2026-01-02\n\nold\n"
    assert section(text, "Unreleased") == "\n\nnew\n\n"
    assert section(text, "0.2.0") == "\n\nold\n"
    assert section(text, "0.1.0") is None


def test_all_versions_agree():
    experiments = (ROOT / "experiments" / "pyproject.toml").read_text()
    assert kronfac.__version__ == version()
    assert re.findall(r'^version = "(.+)"$', experiments, flags=re.MULTILINE) == [version()]
    assert numbers(version())


def test_both_distributions_need_the_same_torch():
    files = [ROOT / "pyproject.toml", ROOT / "experiments" / "pyproject.toml"]
    assert [re.findall(r'"(torch[<>=]+[^"]*)"', file.read_text()) for file in files] == [
        ["torch>=2.7"],
        ["torch>=2.7"],
    ]


def test_a_version_has_three_numbers():
    assert numbers("1.20.3") == (1, 20, 3)
    with pytest.raises(ValueError, match=r"X\.Y\.Z; got '1\.2'"):
        numbers("1.2")

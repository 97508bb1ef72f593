"""A change of the pinned trajectories is said in CHANGELOG.md, and all versions agree."""

import re

import pytest

import kronfac
from tests.release.check import NUMBERS, ROOT, digest, faults, latest_digest, section, version
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


@pytest.mark.parametrize(
    ("changelog", "expected"),
    [
        # The newest one counts, and none that is elsewhere.
        (
            EARLIER + EARLIER.replace("0123456789ab", "ba9876543210").replace("Unrel", "0.0.9"),
            "0123456789ab",
        ),
        (EARLIER.replace(NUMBERS, "### Fixed"), None),
        (EARLIER.replace("Pinned", "### Fixed\n\nPinned"), None),
    ],
)
def test_the_digest_of_a_changelog(changelog, expected):
    assert latest_digest(changelog) == expected


def test_another_record_has_another_digest():
    record = RECORDED.read_bytes()
    assert digest(record.replace(b"1", b"2", 1)) != digest(record)


def test_sections_are_found_by_version():
    text = "# Changelog\n\n## [Unreleased]\n\nnew\n\n## [0.2.0] - 2026-01-02\n\nold\n"
    assert [section(text, name) for name in ("Unreleased", "0.2.0", "0.1.0")] == ["new", "old", ""]


@pytest.mark.parametrize(
    ("tag", "source", "expected"),
    [
        ("v0.2.0", "0.2.0", []),
        ("v0.3.0", "0.2.0", ["The tag is v0.3.0"]),
        ("v0.3.0", "0.3.0", [r"nothing under '## \[0.3.0\]'"]),
    ],
)
def test_what_keeps_a_release_back(tag, source, expected):
    found = faults(tag, source, "## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n\n- A thing.\n")
    assert len(found) == len(expected)
    assert all(re.search(*pair) for pair in zip(expected, found, strict=True))


def test_all_versions_agree():
    experiments = (ROOT / "experiments" / "pyproject.toml").read_text()
    assert kronfac.__version__ == version()
    assert re.findall(r'^version = "(.+)"$', experiments, flags=re.MULTILINE) == [version()]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version())


def test_both_distributions_need_the_same_torch():
    files = [ROOT / "pyproject.toml", ROOT / "experiments" / "pyproject.toml"]
    assert [re.findall(r'"(torch[<>=]+[^"]*)"', file.read_text()) for file in files] == [
        ["torch>=2.7"],
        ["torch>=2.7"],
    ]

"""The workflows: readable, with pinned actions, and with no more rights than they need."""

import re

import pytest
import yaml

from tests.release.check import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.yml"))}
PARSED = {name: yaml.safe_load(text) for name, text in WORKFLOWS.items()}
PROJECT = (ROOT / "pyproject.toml").read_text()
RIGHTS = {
    ("release.yml", "attest"): {"id-token": "write", "attestations": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
    ("release.yml", "announce"): {"contents": "write"},
}
"""Rights of the jobs that may do more than read the sources."""


def jobs() -> list[tuple[str, str]]:
    return [(file, job) for file, parsed in PARSED.items() for job in parsed["jobs"]]


def test_the_workflows_are_found():
    assert {"ci.yml", "release.yml"} <= WORKFLOWS.keys()


@pytest.mark.parametrize("file", WORKFLOWS)
def test_actions_are_pinned_to_a_commit_and_say_its_version(file):
    used = re.findall(r"uses: (.+)$", WORKFLOWS[file], flags=re.MULTILINE)
    assert used
    for action in used:
        assert re.fullmatch(
            r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml", action
        )


def test_an_action_is_pinned_to_the_same_commit_everywhere():
    used = re.findall(r"uses: ([\w./-]+)@(.+)$", "\n".join(WORKFLOWS.values()), flags=re.MULTILINE)
    assert len(set(used)) == len({action for action, _ in used})


@pytest.mark.parametrize(("file", "job"), jobs(), ids="/".join)
def test_a_job_has_the_rights_that_it_needs(file, job):
    parsed = PARSED[file]
    assert parsed["permissions"] in ({}, {"contents": "read"})
    rights = parsed["jobs"][job].get("permissions", parsed["permissions"])
    assert rights == RIGHTS.get((file, job), {"contents": "read"})


@pytest.mark.parametrize(("file", "job"), jobs(), ids="/".join)
def test_a_checkout_leaves_no_credentials_behind(file, job):
    for step in PARSED[file]["jobs"][job].get("steps", []):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_nothing_is_published_that_was_not_tested_and_tried_out():
    found = PARSED["release.yml"]["jobs"]

    def before(job: str) -> set[str]:
        needs = found[job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(before(other) for other in direct))

    assert before("publish") >= {"test", "build", "install", "attest"}
    assert "password" not in WORKFLOWS["release.yml"]
    assert "secrets." not in WORKFLOWS["release.yml"]


def test_the_versions_are_those_of_the_project():
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    oldest = re.findall(r'^dependencies = \["torch>=(.+)"\]$', PROJECT, flags=re.MULTILINE)
    ci, release = PARSED["ci.yml"]["jobs"], PARSED["release.yml"]["jobs"]
    assert ci["test"]["strategy"]["matrix"]["python-version"] == supported
    assert release["install"]["strategy"]["matrix"]["python-version"] == supported
    extremes = [f"torch=={oldest[0]}.0", "torch"]
    assert release["install"]["strategy"]["matrix"]["torch"] == extremes
    assert [run["torch"] for run in ci["torch"]["strategy"]["matrix"]["include"]] == extremes

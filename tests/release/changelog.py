"""The sections of CHANGELOG.md, and the version that is in the sources."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = "### Changes numbers"
"""The heading for everything by which a seeded run ends at other parameters than in the last release."""


def version() -> str:
    """The version that pyproject.toml gives."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def numbers(text: str) -> tuple[int, int, int]:
    """A version X.Y.Z as three numbers."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"A version has the form X.Y.Z; got {text!r}.")
    return int(found[1]), int(found[2]), int(found[3])


def section(changelog: str, name: str) -> str | None:
    """What stands under `## [name]`, which may go on with a date; None if there is no such heading."""
    parts = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get(name)


def digest(recorded: bytes) -> str:
    """A short name for the contents of the pinned trajectories."""
    return hashlib.sha256(recorded).hexdigest()[:12]


def latest_digest(changelog: str) -> str | None:
    """The digest that the newest `Changes numbers` ends with."""
    after = changelog.split(f"\n{NUMBERS}\n", 1)[1:]
    entries = re.split(r"^#", after[0], flags=re.MULTILINE)[0] if after else ""
    found = re.findall(r"^Pinned trajectories: `([0-9a-f]{12})`\.$", entries, flags=re.MULTILINE)
    return found[-1] if found else None

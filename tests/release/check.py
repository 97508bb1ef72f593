"""The version in the sources and what CHANGELOG.md says about it, for a release and for tests.

python -m tests.release.check v0.2.0            print what is wrong with this tag
python -m tests.release.check --notes v0.2.0    print the section of CHANGELOG.md
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = "### Changes numbers"
"""The heading for everything by which a seeded run ends at other parameters than in the last release."""


def version() -> str:
    """The version that pyproject.toml gives."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def section(changelog: str, name: str) -> str:
    """The text under `## [name]`, which may go on with a date; empty if there is no such heading."""
    parts = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get(name, "").strip()


def digest(recorded: bytes) -> str:
    """A short name for the contents of the pinned trajectories."""
    return hashlib.sha256(recorded).hexdigest()[:12]


def latest_digest(changelog: str) -> str | None:
    """The digest that the newest `Changes numbers` ends with."""
    after = changelog.split(f"\n{NUMBERS}\n", 1)[1:]
    entries = re.split(r"^#", after[0], flags=re.MULTILINE)[0] if after else ""
    found = re.findall(r"^Pinned trajectories: `([0-9a-f]{12})`\.$", entries, flags=re.MULTILINE)
    return found[-1] if found else None


def faults(tag: str, source: str, changelog: str) -> list[str]:
    """What keeps a commit with this version from being released under this tag."""
    found = []
    if tag != f"v{source}":
        found.append(
            f"The tag is {tag}, but pyproject.toml has version {source}: both have to be the same."
        )
    if not section(changelog, source):
        found.append(
            f"CHANGELOG.md has nothing under '## [{source}]': add that heading, with a date."
        )
    return found


def main(arguments: list[str]) -> int:
    """Print what is wrong, or the notes."""
    tag, changelog = arguments[-1], (ROOT / "CHANGELOG.md").read_text()
    if "--notes" in arguments:
        print(section(changelog, tag.removeprefix("v")))
        return 0
    found = faults(tag, version(), changelog)
    print(*found, sep="\n", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

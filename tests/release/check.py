"""Whether this commit may be released under a tag.

    python -m tests.release.check v0.2.0            print the rules that are broken
    python -m tests.release.check --notes v0.2.0    print the section of CHANGELOG.md

Needs git and nothing else: the public names are compared as they were recorded in the last release.
"""

import subprocess
import sys

from tests.release.changelog import NUMBERS, ROOT, latest_digest, numbers, section, version

API = "tests/release/public_api.txt"
PLACES = ("major", "minor", "patch")


def git(*arguments: str) -> str | None:
    """What git prints; None if it fails."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def previous_tag(tags: list[str], tag: str) -> str | None:
    """The release before this one: the highest version below it."""
    found = []
    for other in tags:
        try:
            found.append((numbers(other.removeprefix("v")), other))
        except ValueError:
            continue  # a tag that is no release
    earlier = [pair for pair in found if pair[0] < numbers(tag.removeprefix("v"))]
    return max(earlier)[1] if earlier else None


def name_faults(tag: str, source: str, changelog: str) -> list[str]:
    """What is wrong with the version, and with what the changelog says about it."""
    faults = []
    if tag != f"v{source}":
        faults.append(
            f"The tag is {tag}, but pyproject.toml has version {source}: both have to be the same."
        )
    text = section(changelog, source)
    if text is None or not text.strip():
        faults.append(
            f"CHANGELOG.md has nothing under '## [{source}]': add that heading, with a date."
        )
    return faults


def changes(old: str, new: str) -> list[str]:
    """The lines that differ between two records of the public names, gone (-) and new (+)."""
    before, after = ({line for line in r.splitlines() if line[:1] != "#"} for r in (old, new))
    return [f"- {line}" for line in sorted(before - after)] + [
        f"+ {line}" for line in sorted(after - before)
    ]


def needed(differences: list[str], old: tuple[int, int, int]) -> int:
    """The number of a version X.Y.Z that these need to raise, 0 to 2 [Semantic Versioning 2.0.0].

    X if a line is gone, Y if one is new, else Z; before 1.0 one place further right.
    """
    gone = any(line.startswith("-") for line in differences)
    place = 0 if gone else 1 if differences else 2
    return min(place + (old[0] == 0), 2)


def change_faults(
    old: str, new: str, differences: list[str], trajectories: bool, changelog: str
) -> list[str]:
    """What is wrong with the step from one version to the next.

    Args:
        old: the version of the last release.
        new: the version of this one.
        differences: between the public names of the two.
        trajectories: whether the pinned trajectories differ.
        changelog: the text of CHANGELOG.md.
    """
    faults = []
    place = needed(differences, numbers(old))
    if numbers(new)[: place + 1] <= numbers(old)[: place + 1]:
        least, listed = PLACES[place], "\n".join(f"    {line}" for line in differences)
        faults.append(f"From {old} to {new}: needs at least a {least} release.\n{listed}")
    if trajectories and not latest_digest(f"\n{section(changelog, new) or ''}"):
        faults.append(
            f"Seeded runs end elsewhere than in {old}, but '## [{new}]' in CHANGELOG.md has no {NUMBERS!r} "
            "that says so."
        )
    return faults


def main(arguments: list[str]) -> int:
    """Print what is wrong."""
    tag, changelog = arguments[-1], (ROOT / "CHANGELOG.md").read_text()
    if "--notes" in arguments:
        print((section(changelog, tag.removeprefix("v")) or "").strip())
        return 0
    faults = name_faults(tag, version(), changelog)
    previous = previous_tag((git("tag", "--list", "v*") or "").split(), f"v{version()}")
    if previous is None:
        print("No earlier release: nothing to compare the public names with.")
    else:
        before, now = git("show", f"{previous}:{API}"), (ROOT / API).read_text()
        record = "tests/trajectories/recorded.json"
        differs = git("diff", "--quiet", previous, "--", record) is None
        differences = changes(before, now) if before is not None else []
        faults += change_faults(
            previous.removeprefix("v"), version(), differences, differs, changelog
        )
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

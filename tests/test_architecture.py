"""docs/architecture.md names every file of the library, and has the import order of pyproject.toml."""

import re
from pathlib import Path

import kronfac

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = Path(kronfac.__file__).parent


def listed() -> list[str]:
    """The files in the tree of the page, relative to the package."""
    tree = PAGE.split("src/kronfac/\n", 1)[1].split("experiments/src/", 1)[0]
    files, folder = [], ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith("    "):
            folder = name if name.endswith("/") else ""
        files += [folder + file for file in re.findall(r"\w+\.py\b", line)]
    return files


def test_every_file_is_in_the_tree_once():
    files = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(listed()) == sorted(files)


def test_the_import_order_is_that_of_the_contract():
    contract = (ROOT / "pyproject.toml").read_text().split('containers = ["kronfac"]', 1)[1]
    layers = re.findall(r'^    "(.+)",$', contract.split("]", 1)[0], flags=re.MULTILINE)
    printed = PAGE.split("do not import each other:\n\n```\n", 1)[1].split("\n```", 1)[0]
    assert printed.splitlines() == layers


def test_a_step_takes_at_most_ten_hops():
    for heading in (
        "## Follow one `step(closure)`",
        "## Follow one `loss.backward(); step()`",
        "## Follow one `step(optimizer.closure(x, y))`",
    ):
        section = PAGE.split(heading, 1)[1].split("\n## ", 1)[0]
        hops = re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE)
        assert 5 <= len(hops) <= 10

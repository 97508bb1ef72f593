"""Every relative link in the Markdown files leads to a file, and to a heading of it if it names one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "experiments")
    for page in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", flags=re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of the relative links of a page, outside of code."""
    found = LINK.findall(CODE.sub("", page.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages_and_links():
    assert ROOT / "README.md" in PAGES
    assert ROOT / "docs" / "architecture.md" in PAGES
    assert links(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in links(page):
        # Of a picture it is what mkdocs-material shows it on.
        path, _, anchor = re.sub(r"#only-(light|dark)$", "", target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken

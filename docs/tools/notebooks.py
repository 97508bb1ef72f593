"""Notebooks from the pages of docs/notebooks, and the pictures that their examples draw.

A page is the source: text becomes Markdown cells, examples become code cells. `make figures` runs this;
a test compares the notebooks with their pages.
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGES = sorted((DOCS / "notebooks").glob("*.md"))
EXAMPLE = re.compile(r"```python\n(.*?)```\n", flags=re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(\.\./pictures/(\w+\.(?:svg|png))\)\n")
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, in nbformat 4.5, without outputs."""
    cells = []
    for number, piece in enumerate(EXAMPLE.split(page.read_text())):
        code = number % 2 == 1
        # A notebook draws its own pictures, and is read in a folder of its own.
        source = piece if code else LINK.sub(r"\1", PICTURE.sub("", piece))
        if not source.strip():
            continue
        cell: dict[str, Any] = {
            "cell_type": "code" if code else "markdown",
            "id": f"cell-{len(cells)}",
            "metadata": {},
            "source": source.strip().splitlines(keepends=True),
        }
        if code:
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text(page: Path) -> str:
    """What the file of the notebook holds."""
    return json.dumps(notebook(page), ensure_ascii=False, indent=1) + "\n"


def draw(page: Path) -> None:
    """Run the page's examples; the figure before a link to a picture becomes that picture."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams |= {
        "svg.hashsalt": "kronfac",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    names: dict[str, Any] = {}
    content = page.read_text()
    for match in re.finditer(f"{EXAMPLE.pattern}|{PICTURE.pattern}", content, flags=re.DOTALL):
        code, picture = match.groups()
        if code is not None:
            exec(compile(code, page.name, "exec"), names)
        else:
            path = DOCS / "pictures" / picture
            metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
            names["figure"].savefig(path, bbox_inches="tight", dpi=120, metadata=metadata)
            if path.suffix == ".svg":
                path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE))


def main() -> None:
    """Write all notebooks and their pictures."""
    for page in PAGES:
        page.with_suffix(".ipynb").write_text(text(page))
        draw(page)


if __name__ == "__main__":
    main()

"""The library's size, import layers and tree of modules, counted from the files.

python -m tests.structure      print the budgets, and write the tree and the layers of docs/architecture.md
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kronfac
from kronfac import KFAC

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kronfac"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 24
"""Columns for a file's name in the tree."""


def _lines(*folders: Path) -> int:
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sum(len(path.read_text().splitlines()) for path in files)


def layers() -> list[str]:
    """The library's import layers, the highest first."""
    contract = (ROOT / "pyproject.toml").read_text().split('containers = ["kronfac"]', 1)[1]
    return re.findall(r'^    "(.+)",$', contract.split("]", 1)[0], flags=re.MULTILINE)


def modules_of_a_step() -> set[str]:
    """The modules of kronfac that one ordinary `step(closure)` on a small CNN enters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
    )
    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss)
    x, y = torch.randn(32, 1, 8, 8), torch.arange(32) % 5

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(model(x), y)
        value.backward()
        return value

    # The 23rd step has no refresh, no validation and no check of the gradient, like three steps in four.
    for _ in range(22):
        optimizer.step(closure)
    entered: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        optimizer.step(closure)
    finally:
        sys.setprofile(None)
    return {name for name in entered if name.partition(".")[0] == "kronfac"}


def _arguments() -> int:
    parameters = inspect.signature(KFAC.__init__).parameters.values()
    return sum(p.kind is not p.VAR_KEYWORD for p in parameters) - 1  # self


COUNTS: dict[str, Callable[[], int]] = {
    "library lines": lambda: _lines(PACKAGE),
    "files in the package root": lambda: len([*PACKAGE.glob("*.py")]),
    "import layers": lambda: len(layers()),
    "public names": lambda: len(kronfac.__all__),
    "constructor arguments": _arguments,
    "modules that a step enters": lambda: len(modules_of_a_step()),
    "test lines": lambda: _lines(ROOT / "tests"),
    "experiments, lines": lambda: _lines(ROOT / "experiments"),
    "words of docs": lambda: sum(
        len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")
    ),
}


def tree(folder: Path = PACKAGE, indent: str = "  ") -> Iterable[str]:
    """One line per module, with the first sentence of its docstring; folders after files."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}{path.name:<{WIDTH}} {_summary(path)}"
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        yield f"{indent}{inner.name + '/':<{WIDTH}} {_summary(inner / '__init__.py')}"
        yield from tree(inner, indent + "  ")


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n", 1)[0].split()).removesuffix(".")


def generated(page: str) -> str:
    """The page with today's tree and layers."""
    before, rest = page.split("src/kronfac/\n", 1)
    after = rest[rest.index("experiments/src/") :]
    page = f"{before}src/kronfac/\n" + "".join(f"{line.rstrip()}\n" for line in tree()) + after
    heading = "do not import each other:\n\n```\n"
    before, rest = page.split(heading, 1)
    return before + heading + "\n".join(layers()) + rest[rest.index("\n```") :]


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
    for name, count in COUNTS.items():
        print(f"{count():>8,}  {name}")
    print("A step enters:", *sorted(modules_of_a_step()), sep="\n  ")

"""The page of messages quotes what the library says."""

import ast
import re
from pathlib import Path

import kronfac

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "when_something_goes_wrong.md"
PACKAGE = Path(kronfac.__file__).parent


def texts() -> list[str]:
    """Every string of the library, without what is filled in."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                # Of KFAC or of Preconditioner; the page is about KFAC.
                found.append("".join(map(str, parts)).replace("….step()", "KFAC.step()"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_on_the_page_is_one_of_the_library():
    own, torchs = PAGE.read_text().split("## Messages of torch's own", 1)
    quoted = re.findall(r"^\| `([^`]+)` \|", own, flags=re.MULTILINE)
    assert len(quoted) >= 25
    assert len(re.findall(r"^\| `", torchs, flags=re.MULTILINE)) == 3
    said = texts()
    for message in quoted:
        assert any(message in text for text in said), message

"""The documentation site: every example runs, every page is found, every name it gives exists."""

import importlib
import importlib.util
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

import kronfac
from kronfac import testing
from tests import browser
from tests.networks import libraries
from tests.networks.libraries import transformers

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLE = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if EXAMPLE.search(page.read_text())]
LIBRARIES = {
    "lightning": "lightning.pytorch",
    "skorch": "skorch",
    "timm": "timm",
    "deepxde": "deepxde",
    "pina": "pina",
}
"""What the examples of a page import, by its name."""
SMALLER = {"seconds = 2.0": "seconds = 0.1"}


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.filterwarnings("error:KFAC:UserWarning")  # a good run is quiet
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:deepxde", "ignore::DeprecationWarning:skopt"
)
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_examples_of_a_page_run(page, monkeypatch, tmp_path):
    """One after the other, in one namespace."""
    if page.stem in LIBRARIES:
        libraries.import_torchvision()
        monkeypatch.setenv("DDE_BACKEND", "pytorch")
        pytest.importorskip(LIBRARIES[page.stem])
    mpl = pytest.importorskip("matplotlib")
    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    if "transformers import" in page.read_text():
        transformers()
    names: dict[str, object] = {}
    for count, code in enumerate(EXAMPLE.findall(page.read_text())):
        for long, short in SMALLER.items():
            code = code.replace(long, short)  # noqa: PLW2901
        exec(compile(code, f"{name(page)}, example {count}", "exec"), names)
    importlib.import_module("matplotlib.pyplot").close("all")


def test_pages_with_examples_are_found():
    assert {"index.md", "quick_start.md", "howto/loops.md"} <= {name(page) for page in PAGES}


# --- navigation -----------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """A loader of mkdocs.yml, whose tags of Python objects don't matter here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)


def files(nav: object) -> list[str]:
    """The files that a part of the navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [file for part in parts for file in files(part)]


def test_the_navigation_names_every_page_once():
    named = files(SITE["nav"])
    assert len(named) == len(set(named))
    pages = {name(page) for page in DOCS.rglob("*.md")}
    assert set(named) <= pages
    assert {page for page in pages - set(named) if not page.startswith("results/")} == set()


def test_nothing_is_fetched():
    """No fonts, scripts or styles of other hosts."""
    assert SITE["theme"]["font"] is False
    given = [*SITE.get("extra_css", []), *SITE.get("extra_javascript", [])]
    assert given
    assert all((DOCS / file).is_file() for file in given)


def build(folder: Path) -> None:
    """The site, strictly."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


def test_the_site_is_built_strictly(tmp_path):
    build(tmp_path)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(files(SITE["nav"])) // 2
    fetched = re.compile(
        r"<(?:link|script|img|iframe)\b[^>]*(?:href|src)=[\"']?(?:https?:)?//[^>]*>"
    )
    for page in pages:
        assert not fetched.findall(page.read_text()), page.name


@pytest.mark.slow
def test_pages_open_in_a_browser_without_errors(tmp_path):
    """On light and dark pages, wide and narrow, nothing fails, is fetched or sticks out."""
    if reason := browser.why_not():
        pytest.skip(reason)
    build(tmp_path / "site")
    handler = partial(QuietHandler, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with browser.chromium(tmp_path / "profile") as session:
            for theme, width in (("light", 1400), ("dark", 400)):
                scheme = {"name": "prefers-color-scheme", "value": theme}
                session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                for page in files(SITE["nav"]):
                    path = page.replace("README.md", "index.md").replace(".md", ".html")
                    session.get(f"{address}/{path}")
                    reached = session.execute_script("return document.documentElement.scrollWidth")
                    assert reached <= width, page
            errors = [entry for entry in session.get_log("browser") if entry["level"] == "SEVERE"]
        server.shutdown()
    assert not errors


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


# --- names ------------------------------------------------------------------------


def test_the_api_pages_have_every_public_name():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    # By identity: a function that has the name of its module is shown by its whole path.
    shown = [resolve(path) for path in re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)]
    for package in (kronfac, testing):
        for public in set(package.__all__):
            assert any(getattr(package, public) is found for found in shown), public


def resolve(path: str) -> object:
    """What a dotted path names."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(path)


MAP = (DOCS / "paper_to_code.md").read_text()


def test_the_map_of_the_paper_names_what_is_there():
    rows = [line for line in MAP.splitlines() if line.startswith("| ") and "---" not in line]
    code = [row.replace(r"\|", "¦").split("|")[3:5] for row in rows]
    functions = [f for cell, _ in code for f in re.findall(r"`([\w.]+\.\w+)`", cell)]
    tests = [t for _, cell in code for t in re.findall(r"`([\w/]+\.py)`", cell)]
    assert len(functions) > 50
    assert len(tests) > 50
    for function in functions:
        package = (
            "kronfac_experiments"
            if function.startswith(("diagnostics.", "training."))
            else "kronfac"
        )
        found = resolve(f"{package}.{function}")
        assert not isinstance(found, ModuleType), function
    for test in tests:
        assert (ROOT / "tests" / test).is_file(), test


def test_the_map_of_the_paper_has_every_section():
    sections = {
        "§2.1",
        "§2.2",
        "§3.1",
        "§6.1",
        *(f"§4.{i}" for i in range(1, 5)),
        "§5",
        "§7",
        "§8",
        "§9",
    }
    sections |= {f"§6.{i}" for i in range(3, 7)} | {f"§{i}" for i in range(10, 14)}
    for section in sections:
        assert re.search(rf"^\| {re.escape(section)}\b", MAP, flags=re.MULTILINE), section
    for number in range(1, 8):
        assert f"({number}) |" in MAP


# --- notebooks --------------------------------------------------------------------


def test_the_notebooks_are_those_of_their_pages():
    specification = importlib.util.spec_from_file_location(
        "notebooks", DOCS / "tools" / "notebooks.py"
    )
    assert specification
    assert specification.loader
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    assert len(tool.PAGES) == 2
    for page in tool.PAGES:
        assert page.with_suffix(".ipynb").read_text() == tool.text(page), "run `make figures`"

"""docs/defaults.md lists every number that shapes the defaults, as it is in the code."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import kronfac
from kronfac import KFAC, AdaptiveBatchSampler
from tests.conftest import mlp

ROOT = Path(kronfac.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "defaults.md"
NO_DEFAULTS = ("VERSION", "ADAM", "POLAR", "WHITENED")
"""Numbers that shape no step."""
MODULES = [
    *sorted((ROOT / "control").glob("[a-z]*.py")),
    *sorted((ROOT / "step").glob("[a-z]*.py")),
    *(
        ROOT / name
        for name in ("settings.py", "check.py", "model/blocks.py", "whitened_momentum.py")
    ),
    *sorted((ROOT / "model" / "layers").glob("[a-z]*.py")),
]


def listed() -> dict[tuple[str, str], str]:
    """Values by name and file."""
    row = re.compile(r"^\| `([^`]+)` \| (\S+) \| `([^`]+)` \| .+ \|$")
    found = [row.match(line) for line in PAGE.read_text().splitlines()]
    return {(name, file): value for name, value, file in (m.groups() for m in found if m)}


def constants(path: Path) -> list[str]:
    """Names that the file binds to numbers at its top level."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    names = [
        n.id for node in nodes for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
    ]
    module = importlib.import_module(_module(path.relative_to(ROOT)))
    return [name for name in names if _is_number(getattr(module, name))]


def _module(path: Path) -> str:
    return ".".join(("kronfac", *path.with_suffix("").parts))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_constant_of_the_rules_and_the_step_is_listed(path):
    page, file = listed(), str(path.relative_to(ROOT))
    missing = [
        name for name in constants(path) if (name, file) not in page and name not in NO_DEFAULTS
    ]
    assert not missing


def test_every_argument_of_the_default_rules_is_listed():
    settings = KFAC(mlp([2, 2]), kronfac.Gaussian()).settings
    memory, search = settings.step_rule.memory, settings.damping.search
    listed_names = {name for name, _ in listed()}
    for rule in (settings.damping, search, settings.gamma, memory, settings.acceptance):
        numbers = [name for name, value in vars(rule).items() if _is_number(value)]
        assert numbers, f"{type(rule).__name__} has none"
        assert {f"{type(rule).__name__}.{name}" for name in numbers} <= listed_names


@pytest.mark.parametrize(("name", "file"), listed())
def test_what_is_listed_is_there_with_its_value(name, file):
    module = importlib.import_module(_module(Path(file)))
    owner, _, argument = name.rpartition(".")
    if owner:
        value = inspect.signature(getattr(module, owner)).parameters[argument].default
    else:
        value = getattr(module, name)
    assert f"{value:g}" == listed()[name, file]


def test_the_sampler_is_listed():
    parameters = inspect.signature(AdaptiveBatchSampler).parameters
    numbers = {name for name, p in parameters.items() if _is_number(p.default)} - {"seed"}
    names = {name for name, _ in listed()}
    assert {f"AdaptiveBatchSampler.{name}" for name in numbers} <= names

"""`import kronfac` brings little beyond torch: counted in modules, as seconds depend on the machine."""

import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kronfac

PROGRAM = """
import gc, json, sys
import torch
before = set(sys.modules)
import kronfac
assert gc.isenabled()  # the import turns it off for a while
print(json.dumps(sorted(set(sys.modules) - before)))
"""
LATER = (
    "extend",
    "testing",
    "physics",
    "planning",
    "preconditioner",
    "training",
    "whitened_momentum",
)
"""What is imported by those who use it."""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """The modules that `import kronfac` adds to those of `import torch`."""
    path = [str(Path(kronfac.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    modules: list[str] = json.loads(run.stdout)
    return modules


def test_nothing_but_torch_and_the_standard_library(imported):
    roots = {name.partition(".")[0] for name in imported}
    assert roots <= {"kronfac", "torch", *sys.stdlib_module_names}
    assert "kronfac" in roots


def test_nothing_of_torch_that_torch_does_not_import_itself(imported):
    assert [name for name in imported if name.startswith("torch.")] == []


def test_what_few_programs_use_is_imported_later(imported):
    early = [name for name in imported if name.removeprefix("kronfac.").startswith(LATER)]
    assert early == []


def test_the_number_of_modules(imported):
    """They took 0.8 ms each on a busy machine; there are 0.2 s to spend."""
    assert len(imported) < 200


def test_every_public_name_is_there_and_listed():
    packages = {"extend", "integrations", "physics", "testing"}
    assert {*dir(kronfac)} == {*kronfac.__all__, *packages, "__version__"}
    for name in kronfac.__all__:
        getattr(kronfac, name)
    for name, message in (("Nothing", "'Nothing'$"), ("SampledFisher", "it is in kronfac.extend")):
        with pytest.raises(AttributeError, match=message):
            getattr(kronfac, name)


def test_no_public_function_has_the_name_of_a_module():
    found = pkgutil.walk_packages(kronfac.__path__, "kronfac.")
    modules = {module.name.rpartition(".")[2] for module in found}
    functions = [name for name in kronfac.__all__ if inspect.isfunction(getattr(kronfac, name))]
    assert not modules.intersection(functions)

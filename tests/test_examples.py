"""The scripts in examples/ run, at a tiny size."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.networks.libraries import import_torchvision, transformers

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """An example may set it."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_poisson(capsys):
    error = load("poisson").main(steps=40, points=200, width=12)
    assert error < 0.05
    assert "step 40: loss" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec")
def test_pina_poisson(capsys):
    import_torchvision()
    pytest.importorskip("pina")
    assert load("pina_poisson").main(steps=60, points=200, width=16) < 0.05
    assert "relative L² error" in capsys.readouterr().out


@pytest.mark.slow
def test_hugging_face(capsys):
    pytest.importorskip("accelerate")
    transformers()
    assert load("hugging_face").main(epochs=8, examples=128) < 1.8
    assert "loss on new sequences" in capsys.readouterr().out

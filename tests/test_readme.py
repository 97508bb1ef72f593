"""The examples of the README are run as they are printed, one after the other."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run(page: Path, expected: int, names: dict[str, object]) -> list[dict[str, object]]:
    """The names after every example, of which there have to be so many."""
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(examples) == expected
    found = []
    for count, code in enumerate(examples):
        exec(compile(code, f"{page.name}, example {count}", "exec"), names)
        found.append(dict(names))
    return found


@pytest.mark.filterwarnings("error:KFAC:UserWarning")  # a good run is quiet
def test_the_examples_of_the_readme_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    after = run(ROOT / "README.md", 4, {})
    assert float(after[0]["accuracy"]) > 0.9
    assert float(after[1]["loss"]) < 1e-2
    assert "after 50 steps" in capsys.readouterr().out
    assert after[2]["optimizer"].report.iteration == 4
    assert (tmp_path / "training.pt").is_file()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150

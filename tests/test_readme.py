"""The README's examples are run as they are printed, one after the other."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(examples) == 5
    names: dict[str, object] = {}
    for count, code in enumerate(examples):
        exec(compile(code, f"README.md, example {count}", "exec"), names)
        if count == 0:
            assert float(names["loss"]) < 1e-2
            assert "StepReport" in capsys.readouterr().out
    assert names["k"] == 100
    assert (tmp_path / "training.pt").is_file()

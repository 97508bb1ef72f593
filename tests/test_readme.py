"""The README's example is run as it is printed."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_first_example_trains(capsys):
    torch.manual_seed(0)
    code = re.search(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL).group(1)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert float(names["loss"]) < 1e-2
    assert "StepReport" in capsys.readouterr().out

"""A program that turns warnings into errors can take a step."""

import subprocess
import sys

PROGRAM = """
import torch
from torch import nn
from kronfac import KFAC

torch.manual_seed(0)
model, loss_fn = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 2)), nn.CrossEntropyLoss()
optimizer = KFAC(model, loss_fn)
loss_fn(model(torch.randn(20, 2, 8)), torch.randint(2, (20,))).backward()
optimizer.step()
assert optimizer.report is not None and optimizer.report.predicted_change < 0
"""


def test_a_step_gives_no_warning_of_torchs_own() -> None:
    """In a process of its own: torch loads what dual numbers need once."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert not found.returncode, found.stderr

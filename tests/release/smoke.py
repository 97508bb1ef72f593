"""A few steps with an installed kronfac, in an environment that has nothing but its dependencies.

    python -I tests/release/smoke.py [VERSION]

`-I`, so that the sources beside it are not found. Imports nothing of the tests.
"""

import sys
import warnings
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

# torch says so where NumPy is missing, which neither of the two needs.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import kronfac  # noqa: E402
import kronfac.physics  # noqa: E402
import kronfac.testing  # noqa: E402


def main(expected: str | None) -> None:
    """Train a tiny network with and without a closure; raise if anything is amiss."""
    assert version("kronfac") == kronfac.__version__ == (expected or kronfac.__version__)
    assert (files("kronfac") / "py.typed").is_file(), "the wheel lacks py.typed"
    sources = Path(__file__).resolve().parents[2] / "src"
    assert sources not in Path(kronfac.__file__).resolve().parents, "not the installed one"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    loss_fn = nn.MSELoss()
    optimizer = kronfac.KFAC(model, loss_fn)
    x = torch.rand(128, 2)
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    first = float(optimizer.step(optimizer.closure(x, y)))
    for _ in range(10):
        optimizer.step(optimizer.closure(x, y))
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    last = float(loss_fn(model(x), y).detach())
    assert last < first / 100, (first, last)
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"kronfac {kronfac.__version__}, torch {torch.__version__}, Python {python}:", end=" ")
    print(f"loss {first:.3g} before, {last:.3g} after 21 steps")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [None]))

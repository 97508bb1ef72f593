"""Seeded runs whose parameters are recorded: a change of structure may not change them.

    python -m tests.trajectories.runs [--only NAME …]      record all of them anew, or some

A run is a problem, an inverse and a set of rules, in float64 on one thread. Recorded are the losses of its
30 steps and, for every parameter at the end, its norm and its products with a few fixed random vectors.

- `paper`: `presets.paper()`.
- `fixed`: λ and γ fixed, both fractions 1, targets sampled.
- `default`: `KFAC(model, loss)`. Recorded anew only where a fault is mended and numbers change on purpose.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn

import kronfac
from kronfac_experiments.data.curves import curves
from kronfac_experiments.data.mnist import TRAIN_IMAGES, mnist
from kronfac_experiments.problems import CURVES, MNIST, build_model
from tests.trajectories.small_problems import batches, cancer, network, standardised

RECORDED = Path(__file__).parent / "recorded.json"
DATA = Path(os.environ.get("KRONFAC_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
PROJECTIONS = 4
INVERSES = ("block_diagonal", "block_tridiagonal")


@dataclass(frozen=True)
class Problem:
    """A network, a loss and data, all float64."""

    model: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    batch: int
    lambda_: float
    """For the rules that keep λ fixed."""
    weight_decay: float = 0.0
    slow: bool = False


def _friedman() -> tuple[Tensor, Tensor]:
    x, y = map(torch.from_numpy, datasets.make_friedman1(1200, noise=1.0, random_state=0))
    return standardised(x), standardised(y[:, None])


def _digits() -> tuple[Tensor, Tensor]:
    x, y = map(torch.from_numpy, datasets.load_digits(return_X_y=True))
    return standardised(x.double()), y


def _curves() -> tuple[Tensor, Tensor]:
    images = curves(2000).double()
    return images, images


def _mnist() -> tuple[Tensor, Tensor]:
    os.environ["KRONFAC_DATA"] = str(DATA)
    images = mnist().train.images[:4000].double()
    return images, images


PROBLEMS = {
    "friedman": Problem(
        lambda: network((10, 50, 50, 50, 1), nn.GELU), nn.MSELoss, _friedman, 200, 0.1
    ),
    "digits": Problem(
        lambda: network((64, 48, 32, 10), nn.Tanh), nn.CrossEntropyLoss, _digits, 256, 0.1, 1e-4
    ),
    "cancer": Problem(
        lambda: network((30, 32, 32, 1), nn.Sigmoid), nn.BCEWithLogitsLoss, cancer, 569, 0.01
    ),
    "curves": Problem(
        lambda: build_model(CURVES, seed=0).double(), kronfac.Bernoulli, _curves, 300, 5.0, 1e-5,
        slow=True,
    ),
    "mnist": Problem(
        lambda: build_model(MNIST, seed=0).double(), kronfac.Bernoulli, _mnist, 300, 5.0, 1e-5,
        slow=True,
    ),
}  # fmt: skip


def rules(name: str, problem: Problem) -> dict[str, Any]:
    """Keyword arguments for KFAC."""
    if name == "paper":
        return kronfac.presets.paper()
    if name == "fixed":
        return {
            "damping": kronfac.FixedDamping(problem.lambda_),
            "gamma": kronfac.FixedGamma(),
            "step_rule": kronfac.QuadraticModel(bounded=False, memory=None),
            "intervals": kronfac.Intervals(1.0, 1.0, inverse_interval=5),
        }
    return {}


RUNS = [
    (problem, inverse, name)
    for problem in PROBLEMS
    for inverse in INVERSES
    for name in ("paper", "fixed", "default")
]


def available(problem: str) -> bool:
    """Whether its data can be had without a network."""
    return problem != "mnist" or (DATA / TRAIN_IMAGES.path).is_file()


def run(problem_name: str, inverse: str, rule_name: str) -> dict[str, Any]:
    """Losses, and the parameters at the end in a few numbers."""
    problem = PROBLEMS[problem_name]
    model, loss = problem.model(), problem.loss()
    optimizer = kronfac.KFAC(
        model,
        loss,
        inverse=inverse,
        weight_decay=problem.weight_decay,
        **rules(rule_name, problem),
    )
    losses = [
        float(optimizer.step(optimizer.closure(x, y)))
        for x, y in batches(*problem.data(), problem.batch, seed=1)
    ]
    generator = torch.Generator().manual_seed(2)
    parameters = {}
    for name, p in model.named_parameters():
        vectors = torch.randn(PROJECTIONS, p.numel(), generator=generator, dtype=p.dtype)
        flat = p.detach().reshape(-1)
        parameters[name] = [float(flat.norm()), *((vectors @ flat) / p.numel() ** 0.5).tolist()]
    return {"losses": losses, "parameters": parameters}


def main() -> None:
    """Record runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names, such as default")
    wanted = parser.parse_args().only
    torch.set_num_threads(1)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for key in RUNS:
        name = "/".join(key)
        if available(key[0]) and (not wanted or any(part in name for part in wanted)):
            recorded[name] = run(*key)
            print(name, recorded[name]["losses"][-1], flush=True)
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

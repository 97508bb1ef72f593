"""Tiny runs of the command line, shared by the tests of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kronfac_experiments import problems
from kronfac_experiments.cli import main

TINY = ("--layers", "16,8,3", "--threads", "1", "--batch", "40")


def write_cases(folder: Path, name: str = "cases.npz", **arrays: np.ndarray) -> Path:
    """200 cases of 16 numbers in [0, 1] that three hidden numbers explain, or other arrays."""
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(200, 3)) @ generator.normal(size=(3, 16))
    path = folder / name
    np.savez(path, **(arrays or {"cases": (1 / (1 + np.exp(-hidden))).astype(np.float32)}))
    return path


def kronfac(*words: object) -> int:
    return main([str(word) for word in words])


def train(data: Path, run_dir: Path, *words: object) -> int:
    return kronfac("train", "--data", data, *TINY, "--run-dir", run_dir, *words)


def tiny_problems(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Autoencoders of 40 random cases of 12 numbers in the place of the paper's."""
    data = torch.rand(40, 12, generator=torch.Generator().manual_seed(0))
    for name in names:
        tiny = problems.Problem(name, (12, 6, 3, 6, 12), "bernoulli", 1e-5, 40, 10)
        patch.setitem(problems.PROBLEMS, name, tiny)
    patch.setattr(problems, "load", lambda name: (data, data[:10]))


def start_process(*words: object, folder: Path) -> subprocess.Popen[str]:
    """`kronfac …` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kronfac_experiments.cli", *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(run_dir: Path) -> list[dict]:
    """The metrics without what a clock measured."""
    return [{k: v for k, v in r.items() if k not in ("seconds", "parts")} for r in rows(run_dir)]


def checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics and everything in the checkpoint, bit for bit."""
    assert untimed(one) == untimed(other)
    first, second = checkpoint(one), checkpoint(other)
    for name in ("seconds", "metrics_bytes"):
        del first[name], second[name]
    assert_identical(first, second)


def assert_identical(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_identical(a, b)
    else:
        assert one == other

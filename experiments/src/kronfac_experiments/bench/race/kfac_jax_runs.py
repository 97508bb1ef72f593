"""kfac-jax beside the others: an environment of its own, a process a run, the same start and data."""

import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pooch
from torch import nn

from kronfac import Bernoulli, Categorical, ExponentialBatchSize, Gaussian, KronfacError
from kronfac_experiments.bench.race.trials import Entry, batch_of, marks
from kronfac_experiments.session import BATCH_GROWTH, DECAY, FIRST_BATCH
from kronfac_experiments.task import Task

REQUIREMENTS = ("kfac-jax==0.0.8", "jax==0.9.1", "jaxlib==0.9.1")
"""With jax 0.10 kfac-jax 0.0.8 can't be imported."""
READY = "kronfac-ready"
"""A file in an environment that is complete."""
POLL = 0.2
LOSSES = {Bernoulli: "bernoulli", Gaussian: "gaussian", Categorical: "categorical"}
ACTIVATIONS = {nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}


class NoEnvironmentError(KronfacError):
    """The environment of kfac-jax can't be made here."""


def default_environment() -> Path:
    """In the user's cache."""
    return Path(pooch.os_cache("kronfac")) / "-".join(REQUIREMENTS).replace("==", "-")


def environment(folder: Path, say: Callable[[str], None]) -> Path:
    """Its Python, after making it with pip if it is not there.

    Raises:
        NoEnvironmentError: pip can't, in words.
    """
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if (folder / READY).is_file():
        return python
    say(f"Making an environment for kfac-jax in {folder}, 0.7 gigabytes.")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([*install, *REQUIREMENTS], check=True, capture_output=True, text=True)
        check = [str(python), "-I", "-c", "import kfac_jax"]
        subprocess.run(check, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise NoEnvironmentError(
            f"no environment in {folder}: {told[-1] if told else error!r}; "
            f"pip install {' '.join(REQUIREMENTS)} has to work"
        ) from error
    (folder / READY).touch()
    return python


def run_elsewhere(
    python: Path, entry: Entry, task: Task, tick: Callable[[float], None]
) -> tuple[list[list[float]], str]:
    """Rows of a run by `kfac_jax_script.py`, and why it ended early.

    Args:
        python: Interpreter of the environment.
        entry: What to run.
        task: In float32.
        tick: Called now and then with seconds of optimiser time.
    """
    script = resources.files(__package__).joinpath("kfac_jax_script.py")
    with tempfile.TemporaryDirectory() as name, resources.as_file(script) as path:
        folder = Path(name)
        settings = _settings(entry, task, folder)
        settings["compiled"] = str(python.parent.parent / "compiled")
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        with (folder / "stderr").open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [python, "-I", path, folder / "settings.json"],
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                _wait(process, Path(settings["rows"]), tick)
            finally:
                process.kill()
                process.wait()
            errors.seek(0)
            told = errors.read().strip().splitlines()
        rows, message = _read(Path(settings["rows"]))
    if process.returncode and not message:
        message = f"kfac-jax failed: {told[-1] if told else process.returncode}"
    return rows, message


def _wait(process: subprocess.Popen[bytes], path: Path, tick: Callable[[float], None]) -> None:
    seen = 0.0
    while process.poll() is None:
        time.sleep(POLL)
        rows, _ = _read(path)
        if rows and rows[-1][2] > seen:
            tick(rows[-1][2] - seen)
            seen = rows[-1][2]


def _read(path: Path) -> tuple[list[list[float]], str]:
    """Whole lines: rows, and a message for the one that is text."""
    if not path.is_file():
        return [], ""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    content = [json.loads(line) for line in lines if line.endswith("\n")]
    rows = [line for line in content if isinstance(line, list)]
    return rows, next((line for line in content if isinstance(line, str)), "")


def _settings(entry: Entry, task: Task, folder: Path) -> dict[str, Any]:
    """What the script is told; the arrays go to a file beside it."""
    modules = list(task.make_model(entry.seed))
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    after = [*modules[1:], nn.Identity()]
    activations = [
        ACTIVATIONS.get(type(follower), "none")
        for module, follower in zip(modules, after, strict=True)
        if isinstance(module, nn.Linear)
    ]
    arrays = {"inputs": task.train.inputs.numpy()}
    if task.train.targets is not task.train.inputs:
        arrays["targets"] = task.train.targets.numpy()
    for index, layer in enumerate(layers):
        arrays[f"W{index}"] = layer.weight.detach().numpy()
        arrays[f"b{index}"] = layer.bias.detach().numpy()
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    return {
        "arrays": str(folder / "arrays.npz"),
        "rows": str(folder / "rows.jsonl"),
        "activations": activations,
        "loss": LOSSES[type(task.loss)],
        "weight_decay": task.weight_decay,
        "lambda0": entry.point["lambda0"],
        "sizes": sizes_in_octaves(batch_of(entry.point), len(task.train)),
        "seed": entry.seed,
        "limit": entry.limit,
        "marks": marks(entry.limit),
        "until": entry.until,
        "evaluation_cases": entry.evaluation_cases,
        "decay": DECAY,
        "threads": entry.threads,
    }


def sizes_in_octaves(batch: int | str, cases: int) -> list[int]:
    """Sizes of the mini-batches by iteration; the last one stays.

    A growing one doubles where K-FAC's has doubled: every size is compiled for.
    """
    if batch != "paper":
        return [min(int(batch), cases)]
    first = min(FIRST_BATCH, cases)
    grown = ExponentialBatchSize(first, cases, BATCH_GROWTH)
    sizes = [grown(k) for k in range(1, BATCH_GROWTH + 1)]
    octaves = [first * 2 ** int(np.log2(size / first)) for size in sizes[:-1]]
    return [*octaves, cases]

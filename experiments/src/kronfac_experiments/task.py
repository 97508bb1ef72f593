"""What is trained on what: a data set, a network, a loss and the error that is reported."""

import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kronfac import Bernoulli, Categorical, Gaussian
from kronfac.objective import Likelihood
from kronfac_experiments import problems
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.data.fetch import DataError
from kronfac_experiments.data.mnist import mnist_16x16

OWN_WEIGHT_DECAY = 1e-5
"""η for a user's own data: that of CURVES and MNIST."""
HELD_OUT = 6
"""One in so many of a user's own cases is a test case, as in MNIST."""


@dataclass(frozen=True)
class Cases:
    """Inputs (cases, d) and targets; an autoencoder's targets are its inputs, the same tensor."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Cases":
        """On that device; floating-point tensors in that dtype."""
        inputs = self.inputs.to(device, dtype)
        if self.targets is self.inputs:
            return Cases(inputs, inputs)
        floating = self.targets.is_floating_point()
        return Cases(inputs, self.targets.to(device, dtype if floating else None))

    def select(self, rows: Tensor | slice) -> "Cases":
        """Those in these rows."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.inputs.device)
        inputs = self.inputs[rows]
        same = self.targets is self.inputs
        return Cases(inputs, inputs if same else self.targets[rows])


@dataclass(frozen=True)
class Task:
    """A problem with its data."""

    name: str
    layers: tuple[int, ...]
    train: Cases
    test: Cases
    loss: Likelihood
    weight_decay: float
    error_name: str
    make_model: Callable[[int], nn.Sequential]
    """From a seed."""
    error: Callable[[nn.Module, Cases], float]
    sha256: str | None = None
    """Checksum of the user's own file."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "Task":
        """With its data on that device, in that dtype."""
        return replace(self, train=self.train.to(device, dtype), test=self.test.to(device, dtype))


def load_task(config: TrainConfig) -> Task:
    """The task that the configuration names, its data fetched, generated or read."""
    if config.data is not None:
        return own_task(config.data, config.encoder)
    if config.problem == "mnist16":
        return classifier_task()
    assert config.problem is not None
    train, test = problems.load(config.problem)
    return autoencoder_task(problems.PROBLEMS[config.problem], train, test)


def autoencoder_task(problem: problems.Problem, train: Tensor, test: Tensor) -> Task:
    """Reconstruct the inputs."""

    def error(model: nn.Module, cases: Cases) -> float:
        return problems.reconstruction_error(model, cases.inputs, problem=problem)

    return Task(
        name=problem.name,
        layers=problem.layers,
        train=Cases(train, train),
        test=Cases(test, test),
        loss=Bernoulli() if problem.loss == "bernoulli" else Gaussian(),
        weight_decay=problem.weight_decay,
        error_name="squared error a case",
        make_model=lambda seed: problems.build_model(problem, seed),
        error=error,
    )


def classifier_task() -> Task:
    """The classifier of [MG15 §3], which is trained without weight decay."""

    def error(model: nn.Module, cases: Cases) -> float:
        return problems.classification_error(model, cases.inputs, cases.targets)

    data = mnist_16x16()
    return Task(
        name="mnist16",
        layers=problems.CLASSIFIER_LAYERS,
        train=Cases(data.train.images, data.train.labels),
        test=Cases(data.test.images, data.test.labels),
        loss=Categorical(),
        weight_decay=0.0,
        error_name="% misclassified",
        make_model=problems.classifier_model,
        error=error,
    )


def own_task(path: Path, encoder: tuple[int, ...]) -> Task:
    """An autoencoder of the cases in a user's file.

    Cases that all lie in [0, 1] are grey levels, with cross-entropy; others have squared error.
    Without an array `test`, every sixth of the cases, after a fixed shuffle, is a test case.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}; --data takes an .npz file of numpy.savez.")
    content = path.read_bytes()
    arrays = _read(path, content)
    _refuse_what_would_be_ignored(path, list(arrays))
    cases = _checked(path, "cases", arrays.get("cases", next(iter(arrays.values()))))
    if "test" in arrays:
        train, test = cases, _checked(path, "test", arrays["test"])
    else:
        if len(cases) < 2:
            raise DataError(
                f"{path} holds one case; an autoencoder needs some to train and to test."
            )
        order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0))
        held_out = max(1, len(cases) // HELD_OUT)
        test, train = cases[order[:held_out]], cases[order[held_out:]]
    for name, part in (("--layers", encoder[0]), ("the array 'test'", test.shape[1])):
        if part != train.shape[1]:
            raise DataError(
                f"The cases in {path} have {train.shape[1]} numbers each, and {name} has {part}."
            )
    grey = all(float(part.min()) >= 0 and float(part.max()) <= 1 for part in (train, test))
    problem = problems.Problem(
        name=path.stem,
        layers=encoder + encoder[-2::-1],
        loss="bernoulli" if grey else "gaussian",
        weight_decay=OWN_WEIGHT_DECAY,
        train_cases=len(train),
        test_cases=len(test),
    )
    digest = hashlib.sha256(content).hexdigest()
    return replace(autoencoder_task(problem, train, test), sha256=digest)


def _read(path: Path, content: bytes) -> dict[str, npt.NDArray[Any]]:
    try:
        # From memory: of a damaged file NumPy does not close the handle.
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"cases": loaded}
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    # What NumPy raises for a file that is damaged, of another kind, or of Python objects.
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no .npz file of numbers, or is damaged: {error}.") from error
    if not arrays:
        raise DataError(f"{path} holds no arrays.")
    return arrays


def _refuse_what_would_be_ignored(path: Path, names: list[str]) -> None:
    """Refuse targets and whatever else is not the cases and the test cases."""
    used = ("cases" if "cases" in names else names[0], "test")
    ignored = [repr(name) for name in names if name not in used]
    if ignored:
        raise DataError(
            f"{path} also holds the array{'s' if len(ignored) > 1 else ''} {', '.join(ignored)}: --data "
            "trains an autoencoder, whose targets are its inputs, on the arrays 'cases' and 'test'. Leave "
            "out what is not one of them; for targets of your own, use kronfac.KFAC in a loop of your own."
        )


def _checked(path: Path, name: str, array: npt.NDArray[Any]) -> Tensor:
    """The array as float32, if it is a table of finite real numbers."""
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(
            f"The array {name!r} in {path} has shape {array.shape}; it should be (cases, numbers), "
            "neither of them 0."
        )
    if array.dtype.kind not in "biuf":
        raise DataError(f"The array {name!r} in {path} is of {array.dtype}, not of real numbers.")
    tensor = torch.from_numpy(array.astype(np.float32))
    if not tensor.isfinite().all():
        raise DataError(f"The array {name!r} in {path} holds numbers that are not finite.")
    return tensor

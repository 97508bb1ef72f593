"""What the tests of the optimizer share: runs beside the pseudocode, and comparisons of states."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac import KFAC, StepReport
from kronfac.model.side_effects import StandingHook
from tests.conftest import seeded
from tests.optimizer.pseudocode import Numbers, Pseudocode
from tests.reference import dense

INVERSES = ("block_diagonal", "block_tridiagonal")
NUMBERS = ("alpha", "mu", "lambda_", "gamma", "rho", "predicted_change")


def targets_for(loss: nn.Module, z: Tensor, seed: int = 0) -> Tensor:
    """Targets that fit the loss, from outputs z and some noise."""
    noise = torch.rand(z.shape, generator=seeded(seed), dtype=torch.float64).to(z.dtype)
    if isinstance(loss, (nn.CrossEntropyLoss, kronfac.Categorical)):
        return (z + 3 * noise).argmax(dim=1)
    if isinstance(loss, (nn.BCEWithLogitsLoss, kronfac.Bernoulli)):
        return (noise < z.sigmoid()).to(z.dtype)
    return z + noise


def closure_of(optimizer: KFAC, loss: Callable[..., Tensor], x: Tensor, y: Tensor):
    """The closure that a user writes."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(optimizer.model(x), y)
        value.backward()
        return value

    return closure


def agree(
    optimizer: KFAC,
    expected: Pseudocode,
    x: Tensor,
    y: Tensor,
    closure: Callable[[], Any] | None = None,
    K: Tensor | None = None,
) -> Numbers:
    """Take the same step with both and compare every number and every parameter."""
    numbers = expected.step(x, y, K)
    optimizer.step(closure or optimizer.closure(x, y))
    report = optimizer.report
    assert report.iteration == expected.k
    for name in NUMBERS:
        close(getattr(report, name), getattr(numbers, name), f"{name} at step {expected.k}")
    assert_close(dense.theta(optimizer.model), dense.theta(expected.model), rtol=1e-7, atol=1e-9)
    return numbers


def close(ours: float | None, truth: float | None, what: str, tolerance: float = 1e-7) -> None:
    """Both None, or equal to a relative 1e-7."""
    assert (ours is None) == (truth is None), f"{what}: {ours} where {truth} is right"
    if truth is not None:
        assert abs(ours - truth) <= tolerance * max(abs(truth), 1e-2), (
            f"{what}: {ours} where {truth} is right"
        )


def too_long_step(optimizer: KFAC, closure: Callable[[], Any], lr: float = 30.0) -> Any:
    """Take a step that makes things worse, as `lr` times the step that is right."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = lr
    returned = optimizer.step(closure)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return returned


def mean_square(z: Tensor, y: Tensor) -> Tensor:
    """What `nn.MSELoss()` computes, without a loss function that K-FAC knows: it is not seen."""
    return (z - y).square().mean()


# ------------------------------------------------------------------------------------------ states


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal to the bit, types and dtypes included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):  # a λ that is not yet known
        return math.isnan(b)
    return a == b


def _bytes(t: Tensor) -> Tensor:
    """So that NaN is equal to itself, and 0 not to −0."""
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Snapshot:
    """Everything that a step may change, copied."""

    parameters: dict[str, Tensor]
    state: dict[str, Any]
    report: StepReport | None

    @classmethod
    def of(cls, optimizer: KFAC) -> "Snapshot":
        return cls(
            copy.deepcopy(dict(optimizer.model.state_dict())),
            copy.deepcopy(optimizer.state_dict()),
            optimizer.report,
        )

    def assert_untouched(self, optimizer: KFAC, report: bool = True) -> None:
        """The optimizer is as it was when this was taken, to the bit, and has no hooks left."""
        assert same(self.parameters, dict(optimizer.model.state_dict()))
        state = optimizer.state_dict()
        for key, value in self.state["kfac"].items():
            assert same(value, state["kfac"][key]), f"{key} changed"
        assert same(self.state, state)
        if report:
            assert optimizer.report is self.report
        assert_no_hooks(optimizer.model, optimizer.objective.module)


def assert_no_hooks(*roots: nn.Module) -> None:
    """No module under these holds a hook but those that stand by for loops without a closure."""
    for root in roots:
        for name, module in root.named_modules():
            hooks = {**module._forward_hooks, **module._forward_pre_hooks}
            standing = {key for key, hook in hooks.items() if type(hook) is StandingHook}
            for kind in (
                "_forward_hooks",
                "_forward_hooks_with_kwargs",
                "_forward_pre_hooks",
                "_forward_pre_hooks_with_kwargs",
                "_backward_hooks",
                "_backward_pre_hooks",
            ):
                left = set(getattr(module, kind)) - standing
                assert not left, f"{kind} left on {name or type(root).__name__}"
        for name, parameter in root.named_parameters():
            assert not parameter._backward_hooks, f"hook left on {name}"

"""KFAC in torch's own machinery for tests of optimizers: an `OptimizerInfo`, and `optims` to run it.

Torch installs the machinery, not the tests: those of `TestOptimRenewed`, by their names there, are written
anew here, for every input, dtype and device that the machinery gives. An optimizer is made as torch's tests
make theirs, `optim_cls(params, **kwargs)`: `kfac` finds the model that has the parameters. Torch's tests
compute a loss of bare parameters, which K-FAC can't look at; here a module calls them.
"""

import copy
import io
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kronfac import KFAC
from kronfac.extend import BlockTridiagonalInverse, EigenvalueCorrectedInverse
from kronfac.groups import parameters_in
from tests.optimizer.runs import same

pytest.importorskip("expecttest")

from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optims,
)
from torch.testing._internal.common_utils import TestCase, parametrize

pytestmark = pytest.mark.filterwarnings("ignore:The closure left no gradient in 'aside'")
DTYPES = [torch.float32, torch.float64]


MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose parameters optimizers are made with."""


def kfac(params: Any, **settings: Any) -> KFAC:
    """`KFAC` with the smallest model that has these parameters; torch's own come without a model."""
    params = params if isinstance(params, Tensor) else list(params)
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    given = [group["params"] for group in groups]
    wanted = parameters_in([{"params": [p] if isinstance(p, Tensor) else p} for p in given])
    known = [m for m in MODELS if {*wanted} <= {*m.parameters()}]
    model = min(known, key=lambda m: len([*m.parameters()]), default=nn.ParameterList(wanted))
    return KFAC(model, nn.MSELoss(), params=params, **settings)


def inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    return [
        OptimizerInput(params=None, kwargs={}, desc="default"),
        OptimizerInput(params=None, kwargs={"lr": 0.5}, desc="non-default lr"),
        OptimizerInput(params=None, kwargs={"lr": torch.tensor(0.5)}, desc="Tensor lr"),
        OptimizerInput(params=None, kwargs={"weight_decay": 0.01}, desc="weight_decay"),
        OptimizerInput(params=None, kwargs={"fisher": "exact"}, desc="exact Fisher"),
        OptimizerInput(
            params=None,
            kwargs={"inverse": BlockTridiagonalInverse()},
            desc="block-tridiagonal inverse",
        ),
        OptimizerInput(params=None, kwargs={"inverse": EigenvalueCorrectedInverse()}, desc="EKFAC"),
    ]


IN_OTHER_WORDS = ("invalid param type", "Tensor lr must be 1-element")
"""Errors that KFAC has too, with messages of its own."""


def error_inputs(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    """What torch asks of all optimizers, and what is wrong with `lr` and `weight_decay`."""

    def wrong(message: str, error: type[Exception] = ValueError, **given: Any) -> Any:
        return ErrorOptimizerInput(
            OptimizerInput(params=None, kwargs=given, desc=message),
            error_type=error,
            error_regex=message,
        )

    for_all = [
        error
        for error in get_error_inputs_for_all_optims(device, dtype)
        if error.optimizer_error_input.desc not in IN_OTHER_WORDS
    ]
    return [
        *for_all,
        ErrorOptimizerInput(
            OptimizerInput(params=nn.Parameter(torch.ones(1)), kwargs={}, desc=""),
            error_type=TypeError,
            error_regex="params is a list of parameters",
        ),
        wrong("lr is one number", lr=torch.tensor([0.001, 0.001])),
        wrong("lr is one number", lr=-1.0),
        wrong("weight_decay", weight_decay=-1.0),
    ]


INFO = OptimizerInfo(
    kfac,  # type: ignore[arg-type]
    optim_inputs_func=inputs,
    optim_error_inputs_func=error_inputs,
    scheduler_inputs=(
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
        [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4)],
        [
            lambda opt: ExponentialLR(opt, gamma=0.99),
            ReduceLROnPlateau,
        ],
        [lambda opt: LambdaLR(opt, lambda epoch: 0.95**epoch)],
    ),
    supported_impls=(),
    not_og_supported_flags=(),
    supports_complex=False,
)


class Problem:
    """A regression by a small network, whose parameters the optimizer is made with."""

    def __init__(self, device: str, dtype: torch.dtype, contiguous: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(device, dtype)
        for parameter in self.model.parameters():
            parameter.data = normal(*parameter.shape)
            if not contiguous and parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        self.x, self.y = normal(20, 4), normal(20, 3)
        MODELS.add(self.model)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        return nn.functional.mse_loss(self.model(self.x), self.y)

    def closure(self, optimizer: Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def advance(self, optimizer: Optimizer, steps: int) -> list[float]:
        return [optimizer.step(self.closure(optimizer)).item() for _ in range(steps)]

    def state(self) -> dict[str, Tensor]:
        return copy.deepcopy(dict(self.model.state_dict()))


def all_inputs(info: OptimizerInfo, device: str) -> Iterator[dict[str, Any]]:
    for given in info.optim_inputs_func(device=device):
        yield copy.deepcopy(given.kwargs)


def train(task: Problem, optimizer: Optimizer, makers: Sequence[Callable[..., Any]]) -> list[float]:
    """The losses of a dozen steps, with schedules."""
    schedules = [make(optimizer) for make in makers]
    losses: list[float] = []
    for _ in range(12):
        losses += task.advance(optimizer, 1)
        for schedule in schedules:
            plateau = isinstance(schedule, ReduceLROnPlateau)
            schedule.step(losses[-1]) if plateau else schedule.step()
    return losses


class TestOptimRenewed(TestCase):
    @optims([INFO])
    def test_optim_infos_do_not_specify_global_cliquey_kwargs(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            assert not {"foreach", "fused", "differentiable"} & set(kwargs)

    @optims([INFO], dtypes=DTYPES)
    def test_errors(self, device, dtype, optim_info):
        for error in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            given = error.optimizer_error_input
            params = Problem(device, dtype).params() if given.params is None else given.params
            assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
            if issubclass(error.error_type, Warning):
                with pytest.warns(error.error_type, match=error.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)
            else:
                with pytest.raises(error.error_type, match=error.error_regex):
                    optim_info.optim_cls(params, **given.kwargs)

    @parametrize("contiguous", [True, False])
    @parametrize("with_lrsched", [True, False])
    @optims([INFO], dtypes=DTYPES)
    def test_forloop_goes_right_direction(
        self, device, dtype, optim_info, contiguous, with_lrsched
    ):
        schedules = optim_info.scheduler_inputs if with_lrsched else [()]
        for makers in schedules:
            given = list(all_inputs(optim_info, device))
            for kwargs in [{}, {"lr": torch.tensor(0.5)}] if with_lrsched else given:
                task = Problem(device, dtype, contiguous)
                optimizer = optim_info.optim_cls(task.params(), **kwargs)
                losses = train(task, optimizer, makers)
                assert losses[-1] < 0.7 * losses[0]

    @parametrize("with_lrsched", [True, False])
    @optims([INFO], dtypes=DTYPES)
    def test_param_group_with_lrscheduler_goes_right_direction(
        self, device, dtype, optim_info, with_lrsched
    ):
        for makers in optim_info.scheduler_inputs if with_lrsched else [()]:
            task = Problem(device, dtype)
            first, second = task.params()[:2], task.params()[2:]
            groups = [{"params": first}, {"params": second, "lr": 0.5}]
            optimizer = optim_info.optim_cls(groups, lr=1.0)
            losses = train(task, optimizer, makers)
            assert losses[-1] < 0.7 * losses[0]

    @optims([INFO], dtypes=DTYPES)
    def test_tensor_lr(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            kwargs.pop("lr", None)
            ends = []
            for lr in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
                task = Problem(device, dtype)
                torch.manual_seed(0)
                optimizer = optim_info.optim_cls(task.params(), lr=lr, **copy.deepcopy(kwargs))
                task.advance(optimizer, 5)
                ends.append(task.state())
            assert same(ends[0], ends[1])
            assert same(ends[0], ends[2])

    @optims([INFO], dtypes=DTYPES)
    def test_step_is_noop_when_params_have_no_grad(self, device, dtype, optim_info):
        """A branch of the network that this step goes past."""
        for kwargs in all_inputs(optim_info, device):
            task = Problem(device, dtype)
            aside = nn.Linear(4, 3).to(device, dtype)
            model = Branches(task.model, aside)
            optimizer = optim_info.optim_cls(model.parameters(), **kwargs)
            before = copy.deepcopy(aside.state_dict())

            def closure(optimizer=optimizer, model=model, task=task):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(task.x), task.y)
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
            assert same(before, copy.deepcopy(aside.state_dict()))

    @optims([INFO])
    def test_optimizer_can_be_printed(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            task = Problem(device, dtype)
            optimizer = optim_info.optim_cls(task.params(), **kwargs)
            assert "lr" in repr(optimizer)
            task.advance(optimizer, 1)
            assert "lr" in repr(optimizer)

    @parametrize("is_named_optim0", [True, False])
    @parametrize("is_named_optim1", [True, False])
    @optims([INFO], dtypes=DTYPES)
    def test_state_dict_deterministic(
        self, device, dtype, optim_info, is_named_optim0, is_named_optim1
    ):
        """Also `test_can_load_from_to_named_state_dict`."""
        for kwargs in all_inputs(optim_info, device):
            torch.manual_seed(0)
            one, two = Problem(device, dtype), Problem(device, dtype)
            given = one.named() if is_named_optim0 else one.params()
            first = optim_info.optim_cls(given, **copy.deepcopy(kwargs))
            one.advance(first, 4)
            given = two.named() if is_named_optim1 else two.params()
            second = optim_info.optim_cls(given, **copy.deepcopy(kwargs))
            if is_named_optim1:
                assert second.param_groups[0]["param_names"] == [name for name, _ in given]
            two.model.load_state_dict(one.model.state_dict())
            second.load_state_dict(first.state_dict())
            assert one.advance(first, 4) == two.advance(second, 4)
            assert same(first.state_dict()["kfac"], second.state_dict()["kfac"])
            assert same(one.state(), two.state())

    @optims([INFO])
    def test_save_load_equality_with_weights_only(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            task = Problem(device, dtype)
            optimizer = optim_info.optim_cls(task.params(), **kwargs)
            task.advance(optimizer, 2)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert same(optimizer.state_dict(), loaded)

    @optims([INFO])
    def test_step_all_hooks(self, device, dtype, optim_info):
        """Also `test_step_pre_hook` and `test_step_post_hook`."""
        task, order = Problem(device, dtype), []
        optimizer = optim_info.optim_cls(task.params())
        handles = [
            register_optimizer_step_pre_hook(lambda *given: order.append("all, before")),
            register_optimizer_step_post_hook(lambda *given: order.append("all, after")),
            optimizer.register_step_pre_hook(lambda *given: order.append("before")),
            optimizer.register_step_post_hook(lambda *given: order.append("after")),
        ]
        task.advance(optimizer, 1)
        for handle in handles:
            handle.remove()
        task.advance(optimizer, 1)
        assert order == ["all, before", "before", "after", "all, after"]

    @optims([INFO])
    def test_state_dict_pre_post_hook(self, device, dtype, optim_info):
        task, seen = Problem(device, dtype), []
        optimizer = optim_info.optim_cls(task.params())
        optimizer.register_state_dict_pre_hook(lambda opt: seen.append("before"))
        optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "note": 1})
        assert optimizer.state_dict()["note"] == 1
        task.advance(optimizer, 1)
        assert optimizer.state_dict()["note"] == 1
        assert seen == ["before", "before"]
        assert "note" not in copy.deepcopy(optimizer).state_dict()

    @optims([INFO])
    def test_load_state_dict_pre_post_hook(self, device, dtype, optim_info):
        """Also `test_load_state_dict_pre_hook_and_prepend`."""
        task, seen = Problem(device, dtype), []
        optimizer = optim_info.optim_cls(task.params(), lr=0.5)
        task.advance(optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())

        def pre_hook(opt: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            seen.append("before")
            doubled = [{**group, "lr": 2 * group["lr"]} for group in state["param_groups"]]
            state["param_groups"] = doubled
            return state

        optimizer.register_load_state_dict_pre_hook(pre_hook)
        optimizer.register_load_state_dict_pre_hook(
            lambda opt, state: seen.append("first"), prepend=True
        )
        optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("after"))
        optimizer.load_state_dict(saved)
        assert seen == ["first", "before", "after"]
        assert optimizer.param_groups[0]["lr"] == 1.0
        assert saved["param_groups"][0]["lr"] == 0.5, "the caller's own stays as it was"

    @optims([INFO])
    def test_deepcopy_copies_all_public_attrs(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            task = Problem(device, dtype)
            optimizer = optim_info.optim_cls(task.params(), **kwargs)
            task.advance(optimizer, 2)

            def public(opt: Optimizer) -> set[str]:
                return {name for name in vars(opt) if not name.startswith("_")}

            assert public(optimizer) == public(copy.deepcopy(optimizer))

    @optims([INFO])
    def test_non_empty_state(self, device, dtype, optim_info):
        for kwargs in all_inputs(optim_info, device):
            task = Problem(device, dtype)
            optimizer = optim_info.optim_cls(task.params(), **kwargs)
            task.advance(optimizer, 2)
            for p in task.params():
                assert optimizer.state[p]["momentum_buffer"].shape == p.shape
            saved = optimizer.state_dict()
            assert list(saved["state"]) == saved["param_groups"][0]["params"] == [0, 1, 2, 3]


class Branches(nn.Module):
    """Two networks, of which the second is not used."""

    def __init__(self, used: nn.Module, aside: nn.Module) -> None:
        super().__init__()
        self.used, self.aside = used, aside
        MODELS.add(self)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.used(x)
        return z


instantiate_device_type_tests(TestOptimRenewed, globals(), only_for="cpu")

"""A model whose parameters are sharded over processes, and the whole copy that K-FAC computes with.

Every process has a part of each parameter of a model that torch's `fully_shard` was applied to, a DTensor,
and whole ones only while a module runs. K-FAC needs whole matrices, and passes in which parameters are
replaced or displaced. So it has a copy of the model in which every parameter is whole, and none of FSDP's
hooks: it takes the values of the shards when a step begins and their gradients after each backward pass,
and writes its own to the shards whenever it moves them, for which nothing has to be sent.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.distributed import fully_sharded, reshard
from kronfac.errors import UnsupportedModelError
from kronfac.network.standing_hooks import StandingHook

_FSDP = "torch.distributed.fsdp"
_COMPOSABLE = "__composable_api"
"""How the names of the attributes begin in which torch notes what was applied to a module."""


class Shards:
    """Sharded parameters and the whole ones that stand for them in K-FAC's copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._sharded = model
        reshard(model)
        self.pairs = [(p, _whole_parameter(p)) for p in model.parameters() if is_sharded(p)]
        """Each parameter with its whole one."""
        self._whole = dict(self.pairs)
        self._given = {whole: p for p, whole in self.pairs}
        self.model, self._modules = _copy(model, self._whole)
        self._seen: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def whole(self, p: nn.Parameter) -> nn.Parameter:
        """The parameter of the copy that stands for one of the model's; one that is not sharded is both."""
        return self._whole.get(p, p)

    def given(self, p: nn.Parameter) -> nn.Parameter:
        """The model's own parameter for one of the copy."""
        return self._given.get(p, p)

    @torch.no_grad()
    def pull(self) -> None:
        """Take over the values of the shards; all ranks have to call it.

        Raises:
            UnsupportedModelError: the model has other parameters now.
        """
        reshard(self._sharded)
        present = {id(p) for p in self._sharded.parameters()}
        if not all(id(p) in present for p, _ in self.pairs):
            raise UnsupportedModelError(
                "KFAC trains the parameters that the model had when this KFAC was made; some of them have "
                "been replaced since, or were sharded once more. Make a new KFAC after fully_shard."
            )
        for p, whole in self.pairs:
            value = full(p.detach())
            if not torch.equal(whole, value):  # else nobody has written to it
                whole.copy_(value)
        self.follow()

    @torch.no_grad()
    def push(self) -> None:
        """Write the copy's values to the shards; if something is raised in between, once more."""
        try:
            self._push()
        except BaseException:
            self._push()
            raise

    def _push(self) -> None:
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415, it takes a second

        reshard(self._sharded)
        for p, whole in self.pairs:
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            # Without a source rank: every rank takes its part of what it has itself.
            part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
            p.copy_(part)

    def follow(self) -> None:
        """Train or evaluate, and freeze, as the model does."""
        for module, twin in self._modules:
            twin.training = module.training
        for p, whole in self.pairs:
            whole.requires_grad_(p.requires_grad)

    @torch.no_grad()
    def note_gradients(self) -> None:
        """Have a gradient wherever the model has one, with no particular value: it is there to be old."""
        self._seen = {}
        for p, whole in self.pairs:
            whole.grad = None if p.grad is None else torch.zeros_like(whole)
            if p.grad is not None:
                self._seen[p] = marked(p.grad)

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Take over the gradients that are new, or were written to, since `note_gradients`."""
        for p, whole in self.pairs:
            if p.grad is None:
                whole.grad = None
                continue
            tensor, version = self._seen.get(p, (None, 0))
            now = marked(p.grad)
            if tensor is not now[0]:
                whole.grad = full(p.grad)
            elif version != now[1]:
                assert whole.grad is not None
                whole.grad.copy_(full(p.grad))  # the same tensor, with another version
            self._seen[p] = now
        self.follow()

    def drop_gradients(self) -> None:
        """Leave no gradient in the model."""
        for p, _ in self.pairs:
            p.grad = None

    def forget_gradients(self) -> None:
        """Leave no gradient in the copy: it takes memory."""
        self._seen = {}
        for _, whole in self.pairs:
            whole.grad = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The model without gradients while this lasts; then with those that it had."""
        kept = [(p, p.grad) for p, _ in self.pairs]
        try:
            self.drop_gradients()
            yield
        finally:
            for p, grad in kept:
                p.grad = grad


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def full(tensor: Tensor) -> Tensor:
    """All of a tensor; what is sharded is gathered from the ranks, all of which have to ask for it."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered.contiguous()


def marked(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor, of a DTensor this rank's part, and a version that tells of all writes.

    FSDP adds gradients to a part behind its DTensor, and a DTensor writes to its part without counting.
    """
    part: Tensor | None = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor, tensor._version
    return part, part._version + tensor._version


def _whole_parameter(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(full(p.detach()).clone(), requires_grad=p.requires_grad)


def _copy(
    model: nn.Module, parameters: dict[nn.Parameter, nn.Parameter]
) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """The model as it was before `fully_shard`, with other parameters, and which module became which.

    It has the buffers of the model, the very same, and its hooks but for FSDP's and K-FAC's.

    Raises:
        UnsupportedModelError: it can't be copied.
    """
    memo: dict[int, Any] = {id(p): parameters.get(p, p) for p in model.parameters()}
    modules = list(model.modules())
    twins = {}
    for module in modules:
        own = vars(module)
        memo[id(own["_buffers"])] = own["_buffers"]
        for name, hooks in own.items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                kept = {k: hook for k, hook in hooks.items() if not _left_out(hook)}
                memo[id(hooks)] = type(hooks)(kept)
        if fully_sharded(module):
            cls: Any = type(module).__bases__[-1]  # behind one that FSDP has put before it
            twins[id(module)] = memo[id(module)] = cls.__new__(cls)
    try:
        for module in modules:
            if id(module) in twins:
                attributes = {
                    name: value
                    for name, value in vars(module).items()
                    if not name.startswith(_COMPOSABLE)
                }
                vars(twins[id(module)]).update(copy.deepcopy(attributes, memo))
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            "KFAC trains a model that fully_shard was applied to by means of a copy with whole parameters; "
            f"{type(model).__name__} can't be copied: {type(error).__name__}: {error}. Make it work with "
            "copy.deepcopy, without fully_shard."
        ) from error
    return copied, [(module, memo[id(module)]) for module in modules]


def _left_out(hook: Any) -> bool:
    """Whether a hook is FSDP's or K-FAC's own."""
    fsdp = str(getattr(hook, "__module__", "")).startswith(_FSDP)
    return fsdp or isinstance(hook, StandingHook)

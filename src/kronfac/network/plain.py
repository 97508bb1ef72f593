"""Passes of K-FAC's own in plain operations: no fast path, checkpoints, fused kernels or half precision.

What a model computes does not change with any of this, but what can be done with it does. The fast path
of `nn.Transformer*` leaves out padding; reentrant checkpoints have no derivative but their own; fused
attention, oneDNN's LSTM and products of groups (mixtures of experts) have no forward-mode derivative.
Nothing is switched for the process: a `TorchFunctionMode` is its thread's alone, and so is what stands in
for checkpoints here.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kronfac.network.lstm import lstm

Function = Callable[..., Any]


@contextmanager
def own_pass() -> Iterator[None]:
    """A pass as K-FAC runs it: by the modules' own code, in full precision, without reentrant checkpoints.

    Checkpoints of the other kind stay: they have all derivatives, and save the memory that they are for.
    """
    before = torch._C._is_any_autocast_enabled() and _autocast_kinds()
    try:
        with instead_of_checkpoints(_call), _IN_FULL:
            yield
    finally:
        for kind in before or ():
            torch.set_autocast_enabled(kind, True)


class _InFull(TorchFunctionMode):
    """Switches off an autocast that a module opens in its own forward; leaving it restores what was before.

    Modules with a fast path do not take it if anything looks at torch functions.
    """

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch._C._is_any_autocast_enabled():
            for kind in _autocast_kinds():
                torch.set_autocast_enabled(kind, False)
        return func(*args, **(kwargs or {}))


_IN_FULL = _InFull()


def _autocast_kinds() -> list[str]:
    """The kinds of devices that autocast is enabled for."""
    return [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]


# ------------------------------------------------------------------------------------- plain kernels


_GROUPED_PRODUCT: Function | None = getattr(torch, "_grouped_mm", None)
"""What `functional.grouped_mm` calls; torch 2.7 has neither."""


class PlainKernels(TorchFunctionMode):
    """Fused kernels by operations with forward-mode derivatives, with the same random numbers."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func == functional.multi_head_attention_forward:
            return _multi_head_attention(*args, **kwargs)
        if func == torch.lstm:
            return lstm(*args, **kwargs)
        if func == _GROUPED_PRODUCT:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ / √d + mask) v by two products and a softmax."""
    if (
        attn_mask is not None and attn_mask.dtype == torch.bool
    ):  # which this kernel would add as 0 and 1
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -math.inf)
    outputs: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]
    return outputs


def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention with its weights, which no fused kernel gives."""
    call: Function = functional.multi_head_attention_forward
    outputs, weights = call(*args, **{**kwargs, "need_weights": True})
    return outputs, weights if kwargs.get("need_weights", True) else None


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A_g B_g of every group g, which ends before offs[g], one product after the other.

    Layout: (rows, k) and (groups, k, n) have groups of rows, (groups, m, k) and (k, columns) groups of
    columns, and two matrices groups of what is summed over. What belongs to no group is 0, where the kernel
    leaves whatever was in memory.
    """
    if offs is None:  # as many groups on both sides
        product = a @ b
    else:
        ends = offs.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if a.dim() == b.dim():
            product = torch.stack([a[:, g] @ b[g] for g in groups])
        elif b.dim() == 3:
            products = [a[g] @ B for g, B in zip(groups, b, strict=True)]
            product = torch.cat([*products, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
        else:
            products = [A @ b[:, g] for g, A in zip(groups, a, strict=True)]
            rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
            product = torch.cat([*products, rest], dim=1)
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


# --------------------------------------------------------------------------------------- checkpoints

_handlers: dict[int, list[Function]] = {}
"""What each thread does in place of a reentrant checkpoint."""
_lock = threading.Lock()


def _checkpoints() -> Any:
    """Torch's module, when a pass first needs it: torch 2.7 imports it, and sympy with it, only then."""
    from torch.utils import checkpoint  # noqa: PLC0415

    return checkpoint


class _StandIn:
    """In place of torch's function while a thread has a handler; for other threads it is that function."""

    original: Any = None

    @classmethod
    def apply(cls, function: Function, preserve_rng_state: bool, *args: Any) -> Any:
        """What `torch.utils.checkpoint` calls."""
        own = _handlers.get(threading.get_ident())
        call = own[-1] if own else cls.original.apply
        return call(function, preserve_rng_state, *args)


@contextmanager
def instead_of_checkpoints(handler: Function) -> Iterator[None]:
    """Let this thread call `handler(function, preserve_rng_state, *args)` for reentrant checkpoints."""
    thread, checkpoints = threading.get_ident(), _checkpoints()
    with _lock:
        if not _handlers:
            _StandIn.original = checkpoints.CheckpointFunction
            checkpoints.CheckpointFunction = _StandIn
        _handlers.setdefault(thread, []).append(handler)
    try:
        yield
    finally:
        with _lock:
            _handlers[thread].pop()
            if not _handlers[thread]:
                del _handlers[thread]
            if not _handlers:
                checkpoints.CheckpointFunction = _StandIn.original


def _call(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def not_reentrant(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    """The other kind of checkpoint: the same values and memory, and a graph that can be looked into."""
    return _checkpoints().checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


# ------------------------------------------------------------------------------------------- dropout

_DROPOUT = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    functional.multi_head_attention_forward,
}
"""Functions whose argument `training` says whether anything is dropped."""
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoDropout(TorchFunctionMode):
    """Nothing is dropped: masks of other sizes are other masks, and passes could not be compared."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            kwargs = {**kwargs, "training": False}
        elif func == functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) <= 4 else kwargs
        elif func in _RECURRENT:
            # (x, hx, weights, has_biases, layers, dropout, train, …); packed ones have batch sizes after x.
            place = 6 if isinstance(args[3], bool) else 7
            args = (*args[:place], False, *args[place + 1 :])
        return func(*args, **kwargs)

"""How a pass can be divided into examples, which nothing says: so it is tried out.

A pass over a few examples has to give the outputs that they had among all. That is tried with parameters
that are moved at random, so that nothing is independent of other examples only because a weight is still
zero. What fails this, in any way, is used whole.

BatchNorm, which makes examples depend on each other while it trains, is not meant by this: in the trial it
normalises by its running statistics. Some of the examples are a smaller mini-batch then (`subset.py`).
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from kronfac.linalg import take
from kronfac.network.learned import DIVISIONS, WHOLE, Division
from kronfac.network.network import Network
from kronfac.network.plain import NoDropout
from kronfac.network.program import Batch, LossCall, ModelCall, Operation, Pass
from kronfac.network.side_effects import unseen_writes
from kronfac.network.subclasses import keep_attributes

TOLERANCE = 0.1
"""How far outputs may be off in units of their own size and the root of the dtype's precision: other
kernels are used for other sizes, but another example's outputs are not nearly as close."""
MOVED = 0.3
"""How far parameters are moved, in units of what they are initialised with as a rule."""


def select(part: Pass, index: Tensor | range, division: Division) -> Pass:
    """The pass over some of the examples, given by ascending numbers; views for a range of them."""
    examples = part.examples
    chosen: Any = slice(index.start, index.stop) if isinstance(index, range) else index
    first, dim = True, division.dim

    def rows(leaf: Any) -> Any:
        nonlocal first
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if leaf.dim() <= dim or leaf.shape[dim] != examples or not (division.every or first):
            return leaf
        first = False
        place = chosen if isinstance(chosen, slice) else chosen.to(leaf.device)
        some = take(leaf, place) if dim == 0 else leaf[:, place]
        return keep_attributes(some, leaf)

    def of_step(step: ModelCall | Operation) -> ModelCall | Operation:
        if isinstance(step, Operation) and not division.every:
            return step
        args, kwargs = (_map(rows, given) for given in (step.args, step.kwargs))
        if isinstance(step, Operation):
            return replace(step, args=args, kwargs=kwargs)
        return replace(
            step, args=args, kwargs=kwargs, trace=step.trace and step.trace.select(chosen)
        )

    return replace(
        part,
        steps=tuple(map(of_step, part.steps)),
        losses=tuple(_of_loss(loss, index, examples, division) for loss in part.losses),
    )


def _map(function: Callable[[Any], Any], given: Any) -> Any:
    """`pytree.tree_map`, which is slow, but for arguments that are all there is to map."""
    if not given:
        return given
    if type(given) is tuple and all(isinstance(value, Tensor) for value in given):
        return tuple(map(function, given))
    return pytree.tree_map(function, given)


def _of_loss(loss: LossCall, index: Tensor | range, examples: int, division: Division) -> LossCall:
    terms = loss.terms
    each = terms.count // examples
    shape = torch.Size((terms.shape[0] * len(index) // examples, *terms.shape[1:]))
    chosen: Tensor | slice
    if isinstance(index, range) and not division.interleaved:
        chosen = slice(index.start * each, index.stop * each)
    else:
        like = terms.targets if terms.targets is not None else terms.weight
        chosen = _terms(index, terms.count, examples, division)
        chosen = chosen if like is None else chosen.to(like.device)
    return replace(loss, terms=terms.select(chosen, shape), value=None)


def _terms(index: Tensor | range, count: int, examples: int, division: Division) -> Tensor:
    """The numbers of the terms that some examples have, in the order in which their pass gives them."""
    numbers = torch.as_tensor(index).cpu()
    places = torch.arange(count // examples)
    if division.interleaved:
        return (places[:, None] * examples + numbers).reshape(-1)
    return (numbers[:, None] * len(places) + places).reshape(-1)


# ---------------------------------------------------------------------------------------------- trial


def division_of(network: Network, part: Pass) -> Division | None:
    """How a pass can be divided; None if it can only be used whole."""
    return DIVISIONS.get(slicing(network, part))


def slicing(network: Network, part: Pass) -> str:
    """The same by its name."""
    if any(call.trace is not None for call in part.calls):
        return "every"
    if network.device.type == "meta":
        return "every"  # there is nothing to try, and what divides at all divides so as a rule
    key = part.signature
    found = network.learned.division(key)
    if found is None:
        found = network.learned.slicing[key] = _try(network, part)
    return found


def norms_in_training(model: nn.Module) -> list[nn.Module]:
    """The BatchNorms that normalise by the examples that they are given."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]


def arrange(network: Network, batch: Batch) -> Batch:
    """The mini-batch with the dimension that its examples are along, and how its terms are ordered."""
    with network.buffers.preserved():
        found = [division_of(network, part) for part in batch.passes]
    dims = {division.dim for division in found if division}
    passes = []
    for part, division in zip(batch.passes, found, strict=True):
        moved = replace(part, dim=1) if dims == {1} else part
        moved = moved if division or moved.examples == 1 else part
        apart = division is not None and division.interleaved and division.dim == moved.dim
        passes.append(replace(moved, interleaved=True) if apart else moved)
    return replace(batch, passes=tuple(passes))


@torch.no_grad()
def _try(network: Network, part: Pass) -> str:
    with NoDropout(), _moved(network) as model, warnings.catch_warnings():
        # Targets that were not divided as the outputs were: torch's element-wise losses only warn.
        warnings.simplefilter("ignore")
        try:
            whole = part.run(model)
        except Exception:
            return WHOLE  # not all values that parameters may be moved to are valid
        for name, division in DIVISIONS.items():
            if _divides(model, replace(part, dim=division.dim), division, whole):
                return name
    return WHOLE


@contextmanager
def _moved(network: Network) -> Iterator[nn.Module]:
    """The model with parameters of no particular value: a copy, so that other threads see none of it.

    Frozen parameters are not copied, but shared: adapters of a large model are small. A model that can't be
    copied, for whatever reason its own code has, is moved itself, and put back to the bit.
    """
    frozen = {id(p): p for p in network.model.parameters() if not p.requires_grad}
    try:
        model = copy.deepcopy(network.model, dict[int, Any](frozen))
    except Exception:
        model = network.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    training = norms_in_training(model)
    kept = [p.detach().clone() for p in parameters] if model is network.model else []
    try:
        for norm in training:
            norm.training = False
        with unseen_writes(parameters):
            _move(parameters)
        yield model
    finally:
        for norm in training:
            norm.training = True
        if kept:
            with unseen_writes(parameters):
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)


def _move(parameters: Sequence[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        size = MOVED / max(p[0].numel(), 1) ** 0.5 if p.dim() > 1 else MOVED
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        moved = p + size * noise.to(p.device)
        # With the sign that it has: variances and the like stay valid.
        p.copy_(torch.where(p == 0, moved, torch.copysign(moved, p)))


def _divides(model: nn.Module, part: Pass, division: Division, whole: Sequence[Tensor]) -> bool:
    """Whether some of the examples have the outputs that they had among all."""
    examples = part.examples
    if examples < 2 or any(terms.count % examples or not terms.count for terms in part.terms):
        return False
    if division.interleaved and all(terms.count == examples for terms in part.terms):
        return False  # the same as if they stood together
    ends, middle = [0, examples - 1], examples // 2
    # As many as there were, first: an index into them stays in range, which a GPU does not forgive.
    trials = [[(0, middle, examples - 1)[n % 3] for n in range(examples)], sorted({*ends, middle})]
    trials += [[n] for n in sorted({*ends, *_shortest(part)})]
    for trial in trials:
        index = torch.tensor(trial)
        try:
            some = select(part, index, division)
            outputs = some.run(model)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return False
        for terms, before, z, all_ in zip(some.terms, part.terms, outputs, whole, strict=True):
            rows = _terms(index, before.count, examples, division).to(z.device)
            if z.shape != terms.shape or not _agree(terms.matrix(z), before.matrix(all_)[rows]):
                return False
    return True


def _shortest(part: Pass) -> list[int]:
    """Examples for which a model may return less than for all together: the shortest sequences."""
    return [
        int(leaf.argmin())
        for leaf in pytree.tree_leaves([(call.args, call.kwargs) for call in part.calls])
        if isinstance(leaf, Tensor)
        and leaf.shape == (part.examples,)
        and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    ]


def _agree(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * torch.finfo(found.dtype).eps ** 0.5
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= tolerance * (size or 1.0)).all())

"""The examples of a mini-batch: which dimension has them, and subsets S₁ and S₂ of them [MG15 §8].

Examples are along the first dimension and independent of each other, by convention. That is checked once
for every kind of pass, on the first mini-batch: three of the examples alone must give the outputs that they
had among all. A pass that fails is used whole. The same two forward passes show where each unit's outputs
have the examples, for blocks that are built from the gradients of single examples.

The model is in evaluation mode in the check: while it trains, BatchNorm makes examples depend on each
other. Some of the examples are a mini-batch of their own, normalised by their own statistics, as the user's
smaller mini-batch would be.
"""

import hashlib
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from kronfac.linalg import take
from kronfac.model.functions import record_uses
from kronfac.model.layout import by_example
from kronfac.model.nested import keep_attributes
from kronfac.model.network import ExampleDims, Network
from kronfac.model.side_effects import RandomState, replay
from kronfac.record.batch import Batch, LossCall, ModelCall, Operation, Pass

TOLERANCE = 0.1
"""How far outputs may be off in units of their own size and the root of the dtype's precision: other
kernels are used for other sizes, but another example's outputs are not nearly as close."""
NORMALIZED = 64
"""Examples at the least that BatchNorm takes its statistics from."""


# ---------------------------------------------------------------------------------------------- check


def check_examples(network: Network, batch: Batch) -> Batch:
    """The mini-batch with the dimensions of its examples, checked for each new kind of pass."""
    with network.buffers.preserved():
        passes = [replace(part, dims=_dims(network, part)) for part in batch.passes]
    return replace(batch, passes=tuple(passes))


def norms_in_training(model: nn.Module) -> list[nn.Module]:
    """The BatchNorms that normalise by the examples that they are given."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]


def _dims(network: Network, part: Pass) -> ExampleDims:
    """The dimensions of the examples of a pass."""
    if part.examples < 2 or network.device.type == "meta":  # without storage there is no check
        return part.dims
    # A hash, which is saved: the same in every process.
    key = hashlib.sha256(repr(part.signature).encode()).hexdigest()[:32]
    learned = network.learned
    found = learned.dims.get(key)
    if found is None or _has_moved(network, found):
        # Once more after a parameter that was exactly zero has moved: LoRA's B hides what is behind it.
        zeros = sorted(_zeros(network)) if found is None else ()
        found = learned.dims[key] = replace(_check(network, part), zeros=tuple(zeros))
    return found


def _zeros(network: Network) -> frozenset[str]:
    """The names of the parameters that are exactly zero, with one host synchronisation for all."""
    names = [name for unit in network.units for name in unit.names]
    parameters = [p for unit in network.units for p in unit.parameters]
    nonzero = torch.stack([p.any() for p in parameters]).tolist()
    return frozenset(name for name, any_ in zip(names, nonzero, strict=True) if not any_)


def _has_moved(network: Network, dims: ExampleDims) -> bool:
    return bool(dims.zeros) and dims.apart and not _zeros(network).issuperset(dims.zeros)


def _check(network: Network, part: Pass) -> ExampleDims:
    whole = ExampleDims(apart=False)
    if any(terms.count % part.examples or not terms.count for terms in part.terms):
        return whole
    index = _three(part)
    trials = [index]
    if network.device.type != "cpu":
        # As many as there were, first: an index into them stays in range, which a GPU does not forgive.
        trials.insert(0, index.repeat(-(-part.examples // len(index)))[: part.examples])
    random, found = RandomState.current(network.device), whole
    with torch.enable_grad(), _evaluating(network.model), warnings.catch_warnings():
        # Targets that were not divided as the outputs were: torch's losses only warn.
        warnings.simplefilter("ignore")
        try:
            with replay(random):
                outputs, uses = _run(network, part)
            for trial in trials:
                some = select(part, trial)
                with replay(random):
                    own, own_uses = _run(network, some)
                if not _agree(part, some, outputs, own, trial):
                    return whole
                found = _places(network, uses, own_uses, trial, part.examples)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError):
            return whole  # what models raise that take no other number of examples
    return found


def _three(part: Pass) -> Tensor:
    """The first, the middle and the last example, or the three shortest if the model is given lengths."""
    examples = part.examples
    count = min(3, examples - 1)
    for leaf in pytree.tree_leaves([(call.args, call.kwargs) for call in part.calls]):
        if isinstance(leaf, Tensor) and leaf.shape == (examples,) and leaf.dtype in _WHOLE:
            # A model may return less for short sequences alone.
            return leaf.argsort(stable=True)[:count].sort().values.cpu()
    return torch.tensor([0, examples // 2, examples - 1][3 - count :])


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)

_Seen = dict[int, list[tuple[Tensor, int | None]]]
"""By unit, the outputs of its uses, (…, rows), and the dimension of the examples if the layer knows it."""


def _run(network: Network, part: Pass) -> tuple[list[Tensor], _Seen]:
    """The outputs of a pass, and those of every use."""
    seen: _Seen = defaultdict(list)

    def watch(units: Sequence[int], outputs: Tensor, dim: int | None) -> None:
        for n in units:
            seen[n].append((outputs.detach(), dim))

    with record_uses(network.sites, network.units, part.examples, watch=watch):
        outputs = part.run(network.model)
    return [z.detach() for z in outputs], seen


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, whose mask is another for fewer examples, and BatchNorm by its running statistics."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _agree(
    part: Pass, some: Pass, whole: Sequence[Tensor], own: Sequence[Tensor], index: Tensor
) -> bool:
    """Whether some of the examples have the outputs that they had among all."""
    for terms, before, z, all_ in zip(some.terms, part.terms, own, whole, strict=True):
        if z.shape != terms.shape:
            return False
        rows = _terms(index, before.count // part.examples).to(z.device)
        if not _close(terms.matrix(z), before.matrix(all_)[rows]):
            return False
    return True


def _places(
    network: Network, whole: _Seen, some: _Seen, index: Tensor, examples: int
) -> ExampleDims:
    """The dimension of the examples in the outputs of all uses of every unit, if they have one."""
    second, unknown = set[str](), set[str]()
    for n in whole.keys() | some.keys():
        name, pairs = network.units[n].name, [*zip(whole[n], some[n], strict=False)]
        dims = [0, 1] if len(whole[n]) == len(some[n]) else []
        for (all_, given), (own, _) in pairs:
            dims = [
                d for d in dims if _along(all_, own, index, examples, d if given is None else given)
            ]
        if not dims:
            unknown.add(name)
        elif 0 not in dims:
            second.add(name)
    return ExampleDims(second=tuple(sorted(second)), unknown=tuple(sorted(unknown)))


def _along(whole: Tensor, some: Tensor, index: Tensor, examples: int, dim: int) -> bool:
    """Whether some of the examples have the same along this dimension of the outputs as among all."""
    if min(whole.dim(), some.dim()) - 1 <= dim or whole.shape[dim] % examples:
        return False
    if some.shape[dim] % len(index):
        return False
    all_, own = by_example(whole, examples, dim), by_example(some, len(index), dim)
    expected = all_[index.to(all_.device)]
    return expected.shape == own.shape and _close(own, expected)


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * torch.finfo(found.dtype).eps ** 0.5
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= tolerance * (size or 1.0)).all())


# --------------------------------------------------------------------------------------------- subsets


def sizes(examples: int, *fractions: float) -> list[int]:
    """⌈τ m⌉ for every fraction τ of m examples."""
    # 0.07 · 100 is a little above 7.
    return [math.ceil(fraction * examples - 1e-9) for fraction in fractions]


def subsets(
    network: Network,
    batch: Batch,
    counts: Sequence[int],
    generator: torch.Generator | None,
    *,
    start: int = 0,
    total: int | None = None,
) -> list[Batch]:
    """Subsets with these numbers of examples, the smaller ones part of the larger ones.

    With several processes, each has a part of the mini-batch. Examples are chosen by their number in the
    whole, so that the choice does not depend on how they are divided; if only whole passes can be chosen,
    each process chooses some of its own.

    Args:
        network: whose passes they are.
        batch: this process's part of the mini-batch.
        counts: the number of examples of each; a pass that can't be divided is used whole or not at all.
        generator: draws the examples; None takes the first ones.
        start: the number of its first example in the whole.
        total: examples of the whole; None if `batch` has all.
    """
    own_total = batch.examples
    total = own_total if total is None else total
    if min(counts) >= total:
        return [batch for _ in counts]
    if norms_in_training(network.model):
        counts = [_share(count, own_total, total) for count in counts]
        start, total = 0, own_total
        if len(batch.passes) > 1:  # a few examples of each would have no statistics
            return [_whole_passes(batch, count, generator) for count in counts]
        counts = [max(count, min(NORMALIZED, total)) for count in counts]
    if not all(part.apart for part in batch.passes):
        counts = [_share(count, own_total, total) for count in counts]
        return [_whole_passes(batch, count, generator) for count in counts]
    order = None if generator is None else torch.randperm(total, generator=generator)
    found: dict[int, Batch] = {}
    for count in set(counts):
        chosen = range(count) if order is None else order[:count].sort().values
        passes, first = [], start
        for part in batch.passes:
            whole = len(batch.passes) == 1 and total == own_total
            own = chosen if whole else _between(chosen, first, first + part.examples)
            if len(own) == part.examples:
                passes.append(part)
            elif len(own):
                passes.append(select(part, own))
            first += part.examples
        if not passes:
            one = select(batch.passes[0], range(1))
            none = replace(batch, passes=(one,), weightless=True)
            found[count] = none.scaled(0.0)
            continue
        found[count] = replace(batch, passes=tuple(passes))
    return [found[count] for count in counts]


def _share(count: int, own: int, total: int) -> int:
    """The share of `count` examples of a rank that has `own` of `total`."""
    return -(-count * own // total)


def _between(chosen: Tensor | range, start: int, stop: int) -> Tensor | range:
    """The chosen examples of one pass, counted from its first one."""
    if isinstance(chosen, range):
        return range(min(max(chosen.stop - start, 0), stop - start))  # the first ones
    return chosen[(chosen >= start) & (chosen < stop)] - start


def _whole_passes(batch: Batch, count: int, generator: torch.Generator | None) -> Batch:
    """Whole passes with at least `count` examples."""
    number = len(batch.passes)
    order = (
        range(number) if generator is None else torch.randperm(number, generator=generator).tolist()
    )
    chosen: list[int] = []
    for n in order:
        if sum(batch.passes[i].examples for i in chosen) < count:
            chosen.append(n)
    return replace(batch, passes=tuple(batch.passes[n] for n in sorted(chosen)))


def select(part: Pass, index: Tensor | range) -> Pass:
    """The pass over some of the examples, given by ascending numbers; views for a range of them."""
    examples = part.examples
    chosen: Any = slice(index.start, index.stop) if isinstance(index, range) else index

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return leaf
        if leaf.dim() == 0 or len(leaf) != examples:
            return leaf
        place = chosen if isinstance(chosen, slice) else chosen.to(leaf.device)
        return keep_attributes(take(leaf, place), leaf)

    def of_step(step: ModelCall | Operation) -> ModelCall | Operation:
        args, kwargs = pytree.tree_map(rows, (step.args, step.kwargs))
        if isinstance(step, Operation):
            return replace(step, args=args, kwargs=kwargs)
        return replace(
            step, args=args, kwargs=kwargs, trace=step.trace and step.trace.select(chosen)
        )

    return replace(
        part,
        steps=tuple(map(of_step, part.steps)),
        losses=tuple(_of_loss(loss, index, examples) for loss in part.losses),
    )


def _of_loss(loss: LossCall, index: Tensor | range, examples: int) -> LossCall:
    terms = loss.terms
    each = terms.count // examples
    shape = torch.Size((terms.shape[0] * len(index) // examples, *terms.shape[1:]))
    chosen: Tensor | slice
    if isinstance(index, range):
        chosen = slice(index.start * each, index.stop * each)
    else:
        like = terms.targets if terms.targets is not None else terms.weight
        chosen = _terms(index, each)
        chosen = chosen if like is None else chosen.to(like.device)
    return replace(loss, terms=terms.select(chosen, shape), value=None)


def _terms(index: Tensor, each: int) -> Tensor:
    """The numbers of the terms of some examples, with `each` terms per example."""
    if each == 1:
        return index
    return (index.cpu()[:, None] * each + torch.arange(each)).reshape(-1)

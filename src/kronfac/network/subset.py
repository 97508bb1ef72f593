"""Some of the examples of a mini-batch: S₁ and S₂ [MG15 §8].

An argument of the model has the examples as its first dimension or it has not, and nothing says which. So
it is tried: a pass over a few examples has to give the outputs that they had among all. Passes that fail
this, in any way, are used whole.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from kronfac.network.network import Network
from kronfac.network.program import Batch, Pass

TOLERANCE = 0.1
"""How far outputs may be off in units of their own size and the root of the dtype's precision: other
kernels are used for other sizes, but another example's outputs are not nearly as close."""


def sizes(batch: Batch, *fractions: float) -> list[int]:
    """⌈τ m⌉ for every fraction τ."""
    # 0.07 · 100 is a little above 7.
    return [math.ceil(fraction * batch.examples - 1e-9) for fraction in fractions]


def subsets(
    network: Network, batch: Batch, counts: Sequence[int], generator: torch.Generator | None
) -> list[Batch]:
    """Subsets with these numbers of examples, the smaller ones part of the larger ones.

    Args:
        network: whose passes they are.
        batch: the mini-batch.
        counts: how many examples each shall have; a pass that can't be divided counts as a whole.
        generator: draws them; None for the first ones.
    """
    total = batch.examples
    if min(counts) >= total:
        return [batch for _ in counts]
    modes = [slicing(network, part) for part in batch.passes]
    if "whole" in modes:
        return [_whole_passes(batch, count, generator) for count in counts]
    order = None if generator is None else torch.randperm(total, generator=generator)
    found: dict[int, Batch] = {}
    for count in set(counts):
        chosen = range(count) if order is None else order[:count].sort().values
        passes, start = [], 0
        for part, mode in zip(batch.passes, modes, strict=True):
            own = chosen if len(modes) == 1 else _between(chosen, start, start + part.examples)
            if len(own) == part.examples:
                passes.append(part)
            elif len(own):
                passes.append(part.select(own, every=mode == "every"))
            start += part.examples
        found[count] = replace(batch, passes=tuple(passes))
    return [found[count] for count in counts]


def _between(chosen: Tensor | range, start: int, stop: int) -> Tensor | range:
    """Those of the chosen examples that belong to a pass, counted from its first one."""
    if isinstance(chosen, range):
        return range(min(max(chosen.stop - start, 0), stop - start))
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


def slicing(network: Network, part: Pass) -> str:
    """How a pass can be divided: by `"every"` argument, the `"first"` one alone, or only used `"whole"`."""
    examples = part.examples
    if any(call.trace is not None for call in part.calls):
        return "every"
    if examples == 0 or any(terms.count % examples or not terms.count for terms in part.terms):
        return "whole"
    if any(isinstance(m, _BatchNorm) and m.training for m in network.model.modules()):
        return "whole"  # examples depend on each other
    key = _signature(part)
    if key not in network.learned.slicing:
        network.learned.slicing[key] = _try(network, part)
    return network.learned.slicing[key]


def _signature(part: Pass) -> object:
    """What passes that are divided alike have in common."""
    examples = part.examples
    leaves, spec = pytree.tree_flatten([(call.args, call.kwargs) for call in part.calls])
    shapes = tuple(
        (leaf.dim(), leaf.dim() > 0 and len(leaf) == examples) if isinstance(leaf, Tensor) else None
        for leaf in leaves
    )
    return str(spec), shapes, len(part.steps), tuple(t.count // examples for t in part.terms)


@torch.no_grad()
def _try(network: Network, part: Pass) -> str:
    with _without_dropout(network.model):
        return _compare(network, part)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout modules switched off: masks of other sizes are other masks, and nothing could be compared."""
    off = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    try:
        for module in off:
            module.training = False
        yield
    finally:
        for module in off:
            module.training = True


def _compare(network: Network, part: Pass) -> str:
    whole = part.run(network.model)
    index = torch.tensor(sorted({0, part.examples // 2, part.examples - 1}))
    for mode in ("every", "first"):
        try:
            some = part.select(index, every=mode == "every")
            outputs = some.run(network.model)
            if all(
                _agree(
                    terms.matrix(z), before.matrix(all_)[_rows(index, before.count, part.examples)]
                )
                for terms, before, z, all_ in zip(
                    some.terms, part.terms, outputs, whole, strict=True
                )
            ):
                return mode
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
    return "whole"


def _rows(index: Tensor, terms: int, examples: int) -> Tensor:
    each = terms // examples
    return (index[:, None] * each + torch.arange(each)).reshape(-1)


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = TOLERANCE * torch.finfo(found.dtype).eps ** 0.5
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= tolerance * (size or 1.0)).all())

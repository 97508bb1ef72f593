"""Embeddings: every lookup of an index i is Vᵀ e_i, with the unit vector e_i.

The second moments of unit vectors are a diagonal, the frequencies of the indices. So there is never a
matrix of vocabulary times vocabulary.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.errors import UnsupportedModelError
from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, observes
from kronfac.model.registry import Layer, register


@observes(functional.embedding)
def _embedding(
    see: SeeFunctions,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    outputs = functional.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    if see.parameter(weight) is None:
        see.follow(functional.embedding, (weight, input), {}, outputs)
        return outputs
    _refuse(sparse, scale_grad_by_freq)
    scale = None
    if padding_idx is not None:  # its row gets no gradient
        scale = (input != padding_idx % len(weight)).to(weight.dtype)
    see.uses.lookup(outputs, weight, input, scale)
    return outputs


@observes(Tensor.__getitem__)
def _getitem(see: SeeFunctions, table: Tensor, index: Any) -> Tensor:
    """E[i], for a parameter E."""
    outputs = Tensor.__getitem__(table, index)
    if not _look_up(see, outputs, table, index):
        see.follow(Tensor.__getitem__, (table, index), {}, outputs)
    return outputs


@observes(torch.index_select, Tensor.index_select)
def _index_select(see: SeeFunctions, input: Tensor, dim: int, index: Tensor) -> Tensor:
    outputs = torch.index_select(input, dim, index)
    if dim % input.dim() or not _look_up(see, outputs, input, index):
        see.follow(torch.index_select, (input, index), {}, outputs)
    return outputs


def _look_up(see: SeeFunctions, outputs: Tensor, table: Tensor, index: Any) -> bool:
    """Record a lookup of rows of a parameter; return False if this is something else."""
    if see.parameter(table) is None or table.dim() != 2 or len(table) < 2:
        return False
    if not isinstance(index, Tensor) or index.dtype not in _WHOLE:
        return False
    see.uses.lookup(outputs, table, index % len(table))
    return True


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def _refusal(sparse: bool, by_frequency: bool) -> str:
    """Why K-FAC refuses an embedding with these options; empty if it does not."""
    if sparse:
        return (
            "KFAC needs dense gradients; an embedding was made with sparse=True. Make it with "
            "sparse=False: its curvature needs no more memory than a diagonal over the vocabulary."
        )
    if by_frequency:
        return (
            "KFAC needs gradients of the loss; an embedding was made with scale_grad_by_freq=True, which "
            "divides them by counts of the mini-batch. Make it without."
        )
    return ""


def _refuse(sparse: bool, by_frequency: bool) -> None:
    if why := _refusal(sparse, by_frequency):
        raise UnsupportedModelError(why)


@observes(functional.embedding_bag)
def _embedding_bag(
    see: SeeFunctions,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    given: tuple[Any, ...] = (offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
    rest: tuple[Any, ...] = (per_sample_weights, include_last_offset, padding_idx)
    outputs = functional.embedding_bag(input, weight, *given, *rest)
    if see.parameter(weight) is None:
        return outputs
    _refuse(sparse, scale_grad_by_freq)
    if mode == "max":
        see.give_up([weight], functional.embedding_bag)
        return outputs
    # Each lookup is recorded by itself, with the gradient of its bag.
    bags, counted = _bags(input, offsets, include_last_offset, len(outputs))
    scale = counted if padding_idx is None else counted & (input.flatten() != padding_idx)
    factor = scale.to(weight.dtype)
    if per_sample_weights is not None:
        factor = factor * per_sample_weights.detach().flatten()
    elif mode == "mean":
        sizes = factor.new_zeros(len(outputs)).index_add_(0, bags, factor)
        factor = factor / sizes.clamp(min=1)[bags]
    index, scales, filled = _in_rows(input.flatten(), factor, bags, len(outputs))
    see.uses.lookup(outputs, weight, index, scales, filled)
    return outputs


def _bags(input: Tensor, offsets: Tensor | None, last: bool, bags: int) -> tuple[Tensor, Tensor]:
    """The bag of every index, and whether the index is in a bag."""
    if offsets is None:
        numbers = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
    else:
        starts = offsets[:-1] if last else offsets
        places = torch.arange(input.numel(), device=input.device)
        numbers = torch.searchsorted(starts, places, right=True) - 1
    return numbers.clamp(min=0, max=bags - 1), numbers >= 0


def _in_rows(
    indices: Tensor, factor: Tensor, bags: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and factors as (bags, longest bag), and which of the places are filled."""
    sizes = torch.bincount(bags, minlength=count)
    longest = max(int(sizes.max()), 1) if len(sizes) else 1
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(len(indices), device=indices.device) - starts[bags]
    index = indices.new_zeros(count, longest)
    scales = factor.new_zeros(count, longest)
    filled = torch.zeros_like(index, dtype=torch.bool)
    index[bags, place], scales[bags, place], filled[bags, place] = indices, factor, True
    return index, scales, filled


class EmbeddingAdapter(Layer):
    """A table whose rows are looked up."""

    kind: ClassVar[Kind] = "embedding"

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """The weight."""
        return [("weight",)]

    def refusal(self, module: nn.Module) -> str:
        """For its gradients."""
        assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        return _refusal(module.sparse, module.scale_grad_by_freq)


for _type in (nn.Embedding, nn.EmbeddingBag):
    register(_type, EmbeddingAdapter(), subclasses=True)

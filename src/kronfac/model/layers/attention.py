"""nn.MultiheadAttention and F.multi_head_attention_forward, and with them nn.Transformer and its layers.

Queries, keys and values are products of the inputs with the rows of one packed weight (3 E, E), or with a
weight each if keys and values have other widths. In self-attention that is one product. Else the packed
weight has a use for the queries and one or two for keys and values, each with some of its rows: further
places, with gradients that are zero in the other rows. Tensors inside are (length, batch, features):
examples are dimension 1.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, observes
from kronfac.model.registry import Layer, register
from kronfac.model.uses import Layout

FUNCTION = functional.multi_head_attention_forward


@observes(FUNCTION)
def _attention(
    see: SeeFunctions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The arguments are torch's, which also checks them: the closure has called it with the same."""
    inputs = (query, key, value, attn_mask, key_padding_mask, static_k, static_v)
    see.give_up_inputs(FUNCTION, *inputs)
    batched = query.dim() == 3
    query, key, value = _with_batch(query, key, value)
    length, batch = query.shape[:2]
    if use_separate_proj_weight:
        own = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = _separate(see, (query, key, value), own, in_proj_bias)
    else:
        assert in_proj_weight is not None
        q, k, v = _packed(see, (query, key, value), in_proj_weight, in_proj_bias)
    k, v = (_with_row(see, x, bias, batch) for x, bias in ((k, bias_k), (v, bias_v)))
    q, k, v = (_heads(x, batch, num_heads) for x in (q, k, v))
    k, v = (x if given is None else given for x, given in ((k, static_k), (v, static_v)))
    if add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], dim=1) for x in (k, v))
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None  # the fused kernel has a causal mask of its own
    else:
        mask = _mask(attn_mask, key_padding_mask, q, k, batch, num_heads)
        is_causal = is_causal and key_padding_mask is None
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        heads, weights = _with_weights(q, k, v, mask, p)
        joined = heads.transpose(0, 1).reshape(length, batch, -1)
        weights = weights.view(batch, num_heads, length, -1)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    else:
        heads = _fused(q, k, v, mask, p, is_causal, batch)
        joined = heads.permute(2, 0, 1, 3).reshape(length, batch, -1)
    outputs = _product(see, joined, out_proj_weight, out_proj_bias)
    return (outputs if batched else outputs.squeeze(1)), weights


def _with_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(length, batch, features) of all three; what was one tensor stays one."""
    if query.dim() == 3:
        return query, key, value
    q = query.unsqueeze(1)
    k = q if key is query else key.unsqueeze(1)
    return q, k, k if value is key else value.unsqueeze(1)


def _product(see: SeeFunctions, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b, seen."""
    outputs = functional.linear(x, weight, bias)
    see.product(outputs, weight, x, bias, FUNCTION, Layout(dim=1))
    return outputs


def _packed(
    see: SeeFunctions, inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None
) -> list[Tensor]:
    """Queries, keys and values, (length, batch, E) each, from one weight (3 E, E)."""
    query, key, value = inputs
    if key is value and query is key:
        parts: list[tuple[Tensor, int]] = [(query, 3)]
    elif key is value:
        parts = [(query, 1), (key, 2)]
    else:
        parts = [(query, 1), (key, 1), (value, 1)]
    width, found, start = query.shape[-1], [], 0
    for x, count in parts:
        rows = slice(start * width, (start + count) * width)
        outputs = functional.linear(x, weight[rows], None if bias is None else bias[rows])
        see.product(outputs, weight, x, bias, FUNCTION, Layout(dim=1, first_row=rows.start))
        # Each contiguous, as torch has them.
        found += outputs.unflatten(-1, (count, width)).movedim(-2, 0).contiguous().unbind()
        start += count
    return found


def _separate(
    see: SeeFunctions,
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
) -> list[Tensor]:
    """Queries, keys and values, (length, batch, E) each, from a weight each and one bias (3 E,)."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    found, start = [], 0
    for x, weight, part in zip(inputs, weights, biases, strict=True):
        assert weight is not None
        outputs = functional.linear(x, weight, part)
        see.product(outputs, weight, x, None, FUNCTION, Layout(dim=1))
        see.product(outputs, None, x, bias, FUNCTION, Layout(dim=1, first_row=start))
        found.append(outputs)
        start += len(weight)
    return found


def _with_row(see: SeeFunctions, x: Tensor, bias: Tensor | None, batch: int) -> Tensor:
    """Keys or values with a learned one (1, 1, E) after them."""
    if bias is None:
        return x
    repeated = bias.expand(batch, 1, -1)
    see.elementwise(repeated, (bias, None, bias.shape))
    return torch.cat([x, repeated.transpose(0, 1)])


def _heads(x: Tensor, batch: int, heads: int) -> Tensor:
    """(batch · heads, length, E / heads) from (length, batch, E)."""
    return x.view(len(x), batch * heads, -1).transpose(0, 1)


def _mask(
    attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, batch: int, heads: int
) -> Tensor | None:
    """What is added before the softmax, (1 or batch · heads, queries or 1, keys)."""
    added = None
    if attention is not None:
        added = _to_add(attention if attention.dim() == 3 else attention.unsqueeze(0), q, k)
    if padding is not None:
        each = _to_add(padding.reshape(batch, 1, 1, -1), q, k)
        each = each.expand(-1, heads, -1, -1).reshape(batch * heads, 1, -1)
        added = each if added is None else added + each
    return added


def _to_add(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask as numbers: −∞ for what is left out. Learned and zero keys, which come last, are not."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
    return functional.pad(mask, (0, k.shape[1] - mask.shape[-1]))


def _with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Values (batch · heads, queries, E / heads) and weights (batch · heads, queries, keys)."""
    scaled = q * math.sqrt(1.0 / q.shape[-1])
    scores = torch.bmm(scaled, k.mT) if mask is None else torch.baddbmm(mask, scaled, k.mT)
    weights = functional.softmax(scores, dim=-1)
    if dropout > 0:
        weights = functional.dropout(weights, dropout)
    return torch.bmm(weights, v), weights


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, batch: int
) -> Tensor:
    """Values (batch, heads, queries, E / heads), by the kernel that torch takes."""
    if mask is not None:
        mask = mask.unsqueeze(0) if len(mask) == 1 else mask.unflatten(0, (batch, -1))
    q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


class AttentionAdapter(Layer):
    """The packed weight with its bias, or a weight each and a bias for all; learned keys and values."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """By how they are multiplied. The output projection is a module of its own."""
        return [
            ("in_proj_weight", "in_proj_bias"),
            ("q_proj_weight",),
            ("k_proj_weight",),
            ("v_proj_weight",),
            ("bias_k",),
            ("bias_v",),
        ]

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        """What is added to numbers one by one, as biases for several weights are, is elementwise."""
        names: dict[str, Any] = module._parameters
        alone = first == "in_proj_bias" and names.get("in_proj_weight") is None
        return "elementwise" if alone or first in ("bias_k", "bias_v") else "matrix"


register(nn.MultiheadAttention, AttentionAdapter(), subclasses=True)

"""nn.MultiheadAttention and F.multi_head_attention_forward, and with them nn.Transformer and its layers.

Torch's own code runs, but its projections are replaced by functions that record their uses.

Queries, keys and values are products of the inputs with the rows of one packed weight (3 E, E), or with
three weights if keys and values have other widths. In self-attention the packed weight has one use. Else it
has one use for the queries and one or two for keys and values, each of some of its rows: these are further
places, with gradients of zero in the other rows. Tensors inside are (length, batch, features), so that
examples are along dimension 1.
"""

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, observes
from kronfac.model.layout import Layout
from kronfac.model.registry import Layer, register

FUNCTION = functional.multi_head_attention_forward
SIGNATURE = inspect.signature(FUNCTION)
INPUTS = ("query", "key", "value", "attn_mask", "key_padding_mask", "static_k", "static_v")


@observes(FUNCTION)
def _attention(see: SeeFunctions, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    given = SIGNATURE.bind(*args, **kwargs).arguments
    see.give_up_inputs(FUNCTION, *(given.get(name) for name in INPUTS))
    query, bias = given["query"], given["in_proj_bias"]
    # A (1, 1, E) for all examples, whose use is not recorded.
    see.give_up_inputs(FUNCTION, given["bias_k"], given["bias_v"])
    batch = query.shape[1] if query.dim() == 3 else 1

    def packed(
        q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None
    ) -> list[Tensor]:
        return _packed(see, (q, k, v), weight, bias)

    def separate(*given: Any) -> list[Tensor]:
        return _separate(see, given[:3], given[3:6], bias)

    def outwards(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output projection of (length · batch, E)."""
        outputs = functional.linear(x, weight, bias)
        layout = Layout(lambda g: g.unflatten(0, (-1, batch)), dim=1)
        see.product(outputs, weight, layout.arranged(x), bias, FUNCTION, layout)
        return outputs

    names = {
        # This runs inside the mode that records uses; torch's code would call that mode again.
        "has_torch_function": lambda tensors: False,
        "_in_projection_packed": packed,
        "_in_projection": separate,
        "linear": outwards,
    }
    theirs: Any = FUNCTION
    own = FunctionType(
        theirs.__code__, {**theirs.__globals__, **names}, argdefs=theirs.__defaults__
    )
    result: tuple[Tensor, Tensor | None] = own(*args, **kwargs)
    return result


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
    see: SeeFunctions, inputs: tuple[Any, ...], weights: tuple[Any, ...], bias: Tensor | None
) -> list[Tensor]:
    """Queries, keys and values, (length, batch, E) each, from a weight each and one bias (3 E,)."""
    biases = (None, None, None) if bias is None else bias.chunk(3)
    found, start = [], 0
    for x, weight, part in zip(inputs, weights, biases, strict=True):
        outputs = functional.linear(x, weight, part)
        see.product(outputs, weight, x, None, FUNCTION, Layout(dim=1))
        see.product(outputs, None, x, bias, FUNCTION, Layout(dim=1, first_row=start))
        found.append(outputs)
        start += len(weight)
    return found


class AttentionAdapter(Layer):
    """The packed weight with its bias, or a weight each and a bias for all."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """The parameters that are multiplied together. The output projection is a module of its own."""
        return [
            ("in_proj_weight", "in_proj_bias"),
            ("q_proj_weight",),
            ("k_proj_weight",),
            ("v_proj_weight",),
        ]

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        """A bias that is shared by several weights is elementwise, all else is a matrix."""
        alone = first == "in_proj_bias" and module._parameters.get("in_proj_weight") is None
        return "elementwise" if alone else "matrix"


register(nn.MultiheadAttention, AttentionAdapter(), subclasses=True)

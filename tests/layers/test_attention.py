"""nn.MultiheadAttention and nn.Transformer's layers: their products, and what torch computes."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac.extend import DenseBlock, KroneckerBlock
from kronfac.model import find_units, record_uses
from tests.conftest import normal
from tests.layers.kit import (
    assert_exact,
    assert_same_steps,
    assert_uses,
    traced,
)
from tests.layers.problems import regression

N = L = 4  # the same: which dimension has the examples does not show in the sizes
E, H = 6, 2


def attention(**options: Any) -> nn.MultiheadAttention:
    """Six features, two heads; biases that are not zero."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) / 4)
    return module


class Attend(nn.Module):
    """Attention from x to x, to something else, or to two other things; and its weights."""

    def __init__(self, module: nn.MultiheadAttention, to: str = "self", **options: Any) -> None:
        super().__init__()
        self.module, self.to, self.options = module, to, options

    def forward(self, x: Tensor) -> Tensor:
        first = self.module.batch_first
        options = dict(self.options)
        key = x if self.to == "self" else torch.cat([x.cos(), x[:, :1].sin()], dim=1)
        if options.pop("padding", False):
            options["key_padding_mask"] = _padding(x, key.shape[1])
        value = key.exp()[..., : self.module.vdim] if self.to == "others" else key
        key = key[..., : self.module.kdim] if self.to == "others" else key
        if not first:  # what is one tensor stays one
            own = {t: t.transpose(0, 1) for t in (x, key, value)}
            x, key, value = own[x], own[key], own[value]
        outputs, weights = self.module(x, key, value, **options)
        parts = [outputs if first else outputs.transpose(0, 1)]
        parts += [] if weights is None else [weights]
        return torch.cat([part.flatten(1) for part in parts], dim=1)


def _padding(x: Tensor, keys: int) -> Tensor:
    """Which keys are left out, (examples, keys): by the examples themselves, never the first."""
    mask = x[:, :1, 0] > torch.linspace(2, 0, keys, dtype=x.dtype)
    return mask & (torch.arange(keys) > 0)


CAUSAL = torch.triu(torch.ones(L, L, dtype=torch.bool), diagonal=1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "fused": ({}, {"need_weights": False}),
    "batch first": ({"batch_first": True}, {}),
    "batch first, fused": ({"batch_first": True}, {"need_weights": False}),
    "no bias": ({"bias": False}, {"need_weights": False}),
    "weights of heads": ({}, {"average_attn_weights": False}),
    "other": ({}, {"to": "other"}),
    "other, fused": ({"batch_first": True}, {"to": "other", "need_weights": False}),
    "others": ({}, {"to": "others"}),
    "separate": ({"kdim": 5, "vdim": 3}, {"to": "others"}),
    "separate, no bias": ({"kdim": 5, "vdim": 3, "bias": False}, {"to": "others"}),
    "zero key": ({"add_zero_attn": True}, {"need_weights": False}),
    "mask": ({}, {"attn_mask": CAUSAL}),
    "mask of numbers": ({}, {"attn_mask": normal(L, L), "need_weights": False}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "causal, weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "padding": ({}, {"padding": True}),
    "padding, fused": ({"batch_first": True}, {"padding": True, "need_weights": False}),
    "padding, causal": (
        {"add_zero_attn": True},
        {"padding": True, "attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_uses(case):
    options, call = CASES[case]
    model = Attend(attention(**options), **call)
    network = assert_uses(model, normal(N, L, E))
    names = {name for unit in network.units for name in unit.names}
    assert names == {name for name, _ in model.named_parameters()}


def test_units():
    """A packed weight and its bias are one; a bias for several weights is dense."""
    units = {u.names: u for u in find_units(attention()).units}
    assert set(units) == {("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")}
    assert units["in_proj_weight", "in_proj_bias"].shape == (3 * E, E + 1)
    assert isinstance(units["in_proj_weight", "in_proj_bias"].block, KroneckerBlock)
    separate = {u.names: u for u in find_units(attention(kdim=5, vdim=3)).units}
    assert [(n, u.shape) for n, u in separate.items()] == [
        (("in_proj_bias",), (3 * E, 1)),
        (("q_proj_weight",), (E, E)),
        (("k_proj_weight",), (E, 5)),
        (("v_proj_weight",), (E, 3)),
        (("out_proj.weight", "out_proj.bias"), (E, E + 1)),
    ]
    assert isinstance(separate["in_proj_bias",].block, DenseBlock)
    assert isinstance(separate["k_proj_weight",].block, KroneckerBlock)


def test_learned_keys_have_diagonal_blocks():
    model = Attend(attention(add_bias_kv=True))
    with record_uses([], find_units(model).units, N) as seen:
        model(normal(N, L, E))
    assert seen.unseen.keys() == {id(model.module.bias_k), id(model.module.bias_v)}


def test_other_keys_are_further_places():
    """Queries, and keys with values, each with gradients in their own rows."""
    network = assert_uses(Attend(attention(), to="other"), normal(N, L, E))
    x = normal(N, L, E)
    taps = traced(network, x).taps([torch.ones_like(network.model(x))])[0]
    assert [tap.grads.shape for tap in taps] == [(N, L, 3 * E), (N, L + 1, 3 * E)]
    assert not taps[0].grads[..., E:].any()
    assert not taps[1].grads[..., :E].any()


@pytest.mark.parametrize("to", ["self", "other", "others"])
def test_without_a_batch(to):
    module, x = attention(), normal(L, E)
    other = x if to == "self" else x.cos()
    value = x.sin() if to == "others" else other
    expected, weights = module(x, other, value)
    with record_uses([], find_units(module).units, 1):
        found, own = module(x, other, value)
    assert_close(found, expected)
    assert_close(own, weights)


def test_one_example_with_one_place_makes_its_blocks_exact():
    """With a key of zeros beside it, as attention to one place alone is no attention."""
    model = Attend(attention(add_zero_attn=True), need_weights=False)
    assert_exact(regression(model, normal(1, 1, E)))


class Masked(nn.Module):
    """A learned mask, and learned inputs as they are."""

    def __init__(self, learned: str) -> None:
        super().__init__()
        self.module = attention()
        self.learned = nn.Parameter(normal(L, L) if learned == "mask" else normal(L, 1, E))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        if self.learned.dim() == 2:
            return self.module(x, x, x, attn_mask=self.learned)[0].transpose(0, 1).flatten(1)
        return self.module(self.learned, x[:, :1], x[:, :1])[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("learned", ["mask", "query"])
def test_parameters_in_the_place_of_inputs_are_given_up(learned):
    model = Masked(learned)
    with record_uses([], find_units(model).units, N) as seen:
        model(normal(N, L, E))
    why = "used in torch's multi_head_attention_forward, which KFAC does not understand"
    assert seen.unseen == {id(model.learned): why}


# ---------------------------------------------------------------------------------- written another way


class Block(nn.Module):
    """A transformer layer, (examples, length, E) → (examples, …)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(1)


class Written(nn.Module):
    """nn.TransformerEncoderLayer as its documentation has it, of linear layers."""

    def __init__(self, other: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        attn = other.self_attn
        self.packed = nn.Linear(E, 3 * E, dtype=torch.float64)
        with torch.no_grad():
            self.packed.weight.copy_(attn.in_proj_weight)
            self.packed.bias.copy_(attn.in_proj_bias)
        self.out = nn.Linear(E, E, dtype=torch.float64)
        self.out.load_state_dict(attn.out_proj.state_dict())
        self.up, self.down, self.norm1, self.norm2 = (
            copy.deepcopy(m) for m in (other.linear1, other.linear2, other.norm1, other.norm2)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.packed(x).unflatten(-1, (3, H, E // H)).movedim(2, 0).transpose(2, 3)
        q, k, v = heads  # (examples, heads, length, E / heads)
        weights = (q @ k.mT / math.sqrt(E // H)).softmax(dim=-1)
        joined = (weights @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(joined))
        return self.norm2(x + self.down(self.up(x).relu()))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    """Without dropout."""
    torch.manual_seed(1)
    options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
    return nn.TransformerEncoderLayer(E, H, 5, **options)


def test_an_encoder_layer_takes_the_steps_of_one_written_out():
    layer = encoder_layer()
    x, y = normal(N + 1, L, E), normal(N + 1, L * E, seed=1)
    assert_same_steps(Block(layer), Block(Written(layer)), x, y, nn.MSELoss())


class Translate(nn.Module):
    """nn.Transformer from x to a part of it."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Transformer(
            E, H, 1, 1, 5, 0.0, batch_first=batch_first, dtype=torch.float64
        )

    def forward(self, x: Tensor) -> Tensor:
        target = x[:, : L - 1].sin()
        mask = nn.Transformer.generate_square_subsequent_mask(L - 1, dtype=x.dtype)
        if self.model.batch_first:
            return self.model(x, target, tgt_mask=mask).flatten(1)
        outputs = self.model(x.transpose(0, 1), target.transpose(0, 1), tgt_mask=mask)
        return outputs.transpose(0, 1).flatten(1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer(batch_first, training):
    assert_uses(Translate(batch_first).train(training), normal(N + 1, L, E))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer(norm_first, training):
    """In eval() torch has a fused kernel, which is not taken while gradients are wanted."""
    model = Block(encoder_layer(norm_first=norm_first)).train(training)
    assert_uses(model, normal(N, L, E))

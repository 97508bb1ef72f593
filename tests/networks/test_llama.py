"""Llama-style language models of transformers: RMSNorm, rotary positions, grouped attention, gated MLP."""

import pytest
from torch.nn import functional

from tests.networks.libraries import transformers
from tests.networks.training import FEW, VOCABULARY, assert_trains, padded, tokens


def llama(width: int = 32, tied: bool = False, **options):
    config = transformers().LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return transformers().LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_loss_inside_the_model_with_padding(tied):
    model, batch = llama(tied=tied).train(), padded(tokens(4))
    assert_trains(model, lambda: model(**batch).loss, FEW)


def test_the_loss_outside_the_model():
    model, ids = llama().eval(), tokens(4)

    def loss():
        logits = model(ids).logits[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    assert_trains(model, loss, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_wider_one(attention):
    model, batch = llama(64, attn_implementation=attention).train(), padded(tokens(32, 16))
    assert_trains(model, lambda: model(**batch).loss)

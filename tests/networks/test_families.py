"""Two steps on the networks of two libraries: no error, no warning, nothing left untrained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.networks.libraries import timm, transformers
from tests.networks.training import CLASSES, VOCABULARY, assert_moved, images, padded, tokens, train

LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**LAYERS, **WORDS, **ENDS, "num_key_value_heads": 1}
LABELS = {"num_labels": CLASSES}
PIXELS = {"image_size": 32, "patch_size": 8, **LABELS}


def language() -> dict[str, Tensor]:
    return padded(tokens(8))


def sentences() -> dict[str, Tensor]:
    return {**language(), "labels": torch.arange(8) % CLASSES}


def pictures() -> dict[str, Tensor]:
    x, y = images(8, 32)
    return {"pixel_values": x, "labels": y}


@dataclass(frozen=True)
class Family:
    """A network of transformers: its class and config, and what it is called with."""

    network: str
    config: str
    options: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]] = language
    idle: tuple[str, ...] = ()
    """Parts of the names of parameters that may stay as they are: their gradient is below rounding."""

    def build(self, **options: Any) -> nn.Module:
        """With other options in places of its own."""
        config = getattr(transformers(), self.config)(**self.options | options)
        return getattr(transformers(), self.network)(config)


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, **ENDS}),
    "gpt-neo": Family("GPTNeoForCausalLM", "GPTNeoConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 2, **ENDS,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**LAYERS, **WORDS, **ENDS}),
    "bloom": Family("BloomForCausalLM", "BloomConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2, **ENDS}),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": Family("MistralForCausalLM", "MistralConfig", LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 16}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 3}),
    "bert": Family("BertForMaskedLM", "BertConfig", {**LAYERS, **WORDS}),
    "bert, sentences": Family(
        "BertForSequenceClassification", "BertConfig", {**LAYERS, **WORDS, **LABELS}, sentences),
    "albert": Family("AlbertForMaskedLM", "AlbertConfig", {**LAYERS, **WORDS, "embedding_size": 16}),
    "distilbert": Family("DistilBertForSequenceClassification", "DistilBertConfig", {
        **WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, **LABELS}, sentences),
    "deberta-v2": Family("DebertaV2ForSequenceClassification", "DebertaV2Config", {
        **LAYERS, **WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "num_labels": CLASSES}, sentences),
    "t5": Family("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0}),
    "bart": Family("BartForConditionalGeneration", "BartConfig", {
        **WORDS, **ENDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "decoder_start_token_id": 2}),
    "vit": Family("ViTForImageClassification", "ViTConfig", {**LAYERS, **PIXELS}, pictures),
    "swin": Family("SwinForImageClassification", "SwinConfig", {
        **PIXELS, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
        "window_size": 4}, pictures),
    # Its layer scale of 1e-6 leaves next to nothing of the gradient inside the branches.
    "convnext": Family("ConvNextForImageClassification", "ConvNextConfig", {
        "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_labels": CLASSES}, pictures,
        ("layernorm.weight",)),
    "resnet": Family("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "num_labels": CLASSES}, pictures),
}  # fmt: skip

TIMM: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # Its branches end in scales of zero, behind which the second step finds gradients of 1e-5.
    "resnet18": ({"channels": (8, 16, 16, 16)}, ("bn1.weight",)),
    "resnet26d": ({"channels": (8, 8, 16, 16)}, ()),
    "mobilenetv3_small_050": ({}, ()),
    "densenet121": ({"growth_rate": 8, "block_config": (2, 2)}, ()),
    "convnext_atto": ({"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}, ("norm.weight",)),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}, ()),
}  # fmt: skip


def assert_steps(model: nn.Module, loss: Callable[[], Tensor], idle: tuple[str, ...]) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, events = train(model, loss, 2)
    assert torch.tensor(losses).isfinite().all()
    assert events <= {"rejected"}
    for name, p in model.named_parameters():
        if any(part in name for part in idle):
            before[name] = torch.full_like(p, torch.nan)  # equals nothing
    assert_moved(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_on_a_network_of_transformers(name, training):
    family = FAMILIES[name]
    model, batch = family.build().train(training), family.batch()
    assert_steps(model, lambda: model(**batch).loss, family.idle)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TIMM)
def test_a_step_on_a_network_of_timm(name, training):
    options, idle = TIMM[name]
    model = timm().create_model(name, num_classes=CLASSES, **options).train(training)
    x, y = images(8, 32)
    assert_steps(model, lambda: functional.cross_entropy(model(x), y), idle)

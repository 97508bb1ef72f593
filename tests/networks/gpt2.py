"""GPT-2 of transformers: its own transposed `Conv1D` layers, a tied head, dropout of 0.1."""

from tests.networks.libraries import transformers
from tests.networks.training import VOCABULARY


def gpt2(width: int = 32, tied: bool = True):
    config = transformers().GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=width,
        n_layer=2,
        n_head=2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers().GPT2LMHeadModel(config)

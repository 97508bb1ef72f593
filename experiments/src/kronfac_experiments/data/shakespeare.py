"""Tiny Shakespeare as windows of characters: 1,115,394 of them, 65 symbols, in the public domain.

Inputs and targets are (windows, context), int64: the target of a character is the next one. Windows
follow one another without overlap. The first 90 % of the text are for training, the rest for
validation.
"""

import gzip
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kronfac_experiments.data.fetch import DataFile, fetch, find

PACKED = DataFile(
    "tinyshakespeare/input.txt.gz",
    "bed00f18e91cda6838950656f0a95e07e0f4dbe8649a4b959f7602a7e53fbc6e",
)
"""The text compressed, which only a data folder can hold."""
TEXT = DataFile(
    "tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
"""The text as karpathy/char-rnn on GitHub has it."""
TRAIN_SHARE = 0.9


class Windows(NamedTuple):
    """Characters and those that follow them, as numbers from 0 in the order of the symbols."""

    inputs: Tensor  # (windows, context)
    targets: Tensor  # (windows, context)


class Shakespeare(NamedTuple):
    """Both parts of the text, and its symbols in order."""

    train: Windows
    validation: Windows
    symbols: str


def shakespeare(context: int) -> Shakespeare:
    """The text in windows of `context` characters; what is left over at the end of a part is dropped."""
    characters = np.frombuffer(_content(), dtype=np.uint8)
    symbols, numbers = np.unique(characters, return_inverse=True)
    text = torch.from_numpy(numbers.astype(np.int64))
    split = int(TRAIN_SHARE * len(text))
    train, validation = (_windows(part, context) for part in (text[:split], text[split:]))
    return Shakespeare(train, validation, symbols.tobytes().decode("ascii"))


def _content() -> bytes:
    packed = find(PACKED)
    return fetch(TEXT).read_bytes() if packed is None else gzip.decompress(packed.read_bytes())


def _windows(text: Tensor, context: int) -> Windows:
    windows = (len(text) - 1) // context
    used = windows * context
    return Windows(text[:used].view(windows, context), text[1 : used + 1].view(windows, context))

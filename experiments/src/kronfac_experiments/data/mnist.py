"""MNIST as tensors: the autoencoder problem of [MG15 §13] and the 16×16 classifier of [MG15 §3].

Images are (cases, pixels), float32 in [0, 1], rows of a picture one after another; labels are
(cases,), int64.
"""

import gzip
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac_experiments.data.fetch import DataError, DataFile, fetch

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SIDE = 28


def _file(name: str, sha256: str) -> DataFile:
    return DataFile(f"mnist/{name}", sha256, tuple(mirror + name for mirror in MIRRORS))


TRAIN_IMAGES = _file(
    "train-images-idx3-ubyte.gz",
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
)
TRAIN_LABELS = _file(
    "train-labels-idx1-ubyte.gz",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
)
TEST_IMAGES = _file(
    "t10k-images-idx3-ubyte.gz",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
)
TEST_LABELS = _file(
    "t10k-labels-idx1-ubyte.gz",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)


class LabelledImages(NamedTuple):
    """Images and their classes."""

    images: Tensor  # (cases, pixels)
    labels: Tensor  # (cases,)


class Mnist(NamedTuple):
    """The 60,000 training and 10,000 test cases."""

    train: LabelledImages
    test: LabelledImages


def mnist() -> Mnist:
    """The original 28×28 images, 784 pixels each."""
    return Mnist(
        LabelledImages(_images(TRAIN_IMAGES), _labels(TRAIN_LABELS)),
        LabelledImages(_images(TEST_IMAGES), _labels(TEST_LABELS)),
    )


def mnist_16x16() -> Mnist:
    """The images scaled down to 16×16, 256 pixels each, for the classifier of [MG15 §3].

    The paper does not say how it scaled them. Here output pixel i of a row or column is the mean
    of the input pixels ⌊1.75 i⌋ … ⌈1.75 (i + 1)⌉ − 1, two or three of them, without a crop.
    """
    return Mnist(*(LabelledImages(_scaled(part.images, 16), part.labels) for part in mnist()))


def _scaled(images: Tensor, side: int) -> Tensor:
    pictures = images.view(-1, 1, SIDE, SIDE)
    return F.interpolate(pictures, size=(side, side), mode="area").flatten(1)


def _images(file: DataFile) -> Tensor:
    pixels = read_idx(file).astype(np.float32)
    return torch.from_numpy(pixels).flatten(1) / 255.0


def _labels(file: DataFile) -> Tensor:
    return torch.from_numpy(read_idx(file).astype(np.int64))


def read_idx(file: DataFile) -> npt.NDArray[np.uint8]:
    """The array in a gzipped idx file of bytes.

    The format: two zero bytes, the type (8 for unsigned bytes), the number of dimensions, each
    dimension as a big-endian 32-bit integer, and the values in row-major order.
    """
    content = gzip.decompress(fetch(file).read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise DataError(
            f"{file.path} is no idx file of unsigned bytes: it starts with {content[:4].hex()} "
            "and not with 000008."
        )
    dimensions = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    return values.reshape(tuple(int(size) for size in shape))

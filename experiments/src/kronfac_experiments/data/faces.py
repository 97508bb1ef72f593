"""FACES: patches of the Olivetti faces, the data set of an autoencoder problem of [MG15 §13].

The original file is not to be had. This one is built from the same 400 photographs (40 people,
ten each; credit AT&T Laboratories Cambridge) by the published recipe, and comes out close: 30
principal components leave a squared test error of 141.7, against 135 published.

Patches are (cases, 625), float32, 25 rows of 25 pixels; those of an image lie together.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.io
import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac_experiments.data.fetch import DataFile, fetch, find

SIDE = 64
PATCH = 25
PATCHES_PER_IMAGE = 414
IMAGES_PER_PERSON = 10
TRAIN_PEOPLE, VALIDATION_PEOPLE = 25, 5  # the other ten are the test set
SMALLEST_STEP, LARGEST_STEP = 1.4, 1.8  # image pixels between neighbouring patch pixels

# `faces` (400, 64, 64) uint8, upright; a repackaging that only a data folder can hold.
UPRIGHT = DataFile(
    "olivetti/olivetti_faces.npz",
    "c7cb70822f108b0510ff41c9bfc7a6ad74ef8f80aef4063cd1a25a43c76906df",
)
# `faces` (4096, 400) uint8: the file of S. Roweis that scikit-learn downloads, too.
ORIGINAL = DataFile(
    "olivetti/olivettifaces.mat",
    "b612fb967f2dc77c9c62d3e1266e0c73d5fca46a4b8906c18e454d41af987794",
    ("https://ndownloader.figshare.com/files/5976027",),
)


class Faces(NamedTuple):
    """The patches of 25, 5 and 10 people."""

    train: Tensor
    validation: Tensor
    test: Tensor


def faces(seed: int = 0, patches_per_image: int = PATCHES_PER_IMAGE) -> Faces:
    """Random patches, each pixel shifted to zero mean and all scaled to an average variance of 1.

    Mean and scale are over the whole set, validation and test included, as in the recipe.

    Args:
        seed: Seed of the patches' angles, steps and places.
        patches_per_image: 414 gives the paper's 103,500 training and 41,400 test cases.
    """
    patches = cut_patches(olivetti_images(), patches_per_image, seed)
    patches -= patches.mean(dim=0)
    patches /= patches.square().mean().sqrt()
    of_person = IMAGES_PER_PERSON * patches_per_image
    train, validation = TRAIN_PEOPLE * of_person, VALIDATION_PEOPLE * of_person
    return Faces(*patches.tensor_split((train, train + validation)))


def olivetti_images() -> Tensor:
    """The 400 photographs, (400, 64, 64), float32 in [0, 1], upright, ten of a person in a row."""
    upright = find(UPRIGHT)
    if upright is not None:
        with np.load(upright, allow_pickle=False) as archive:
            pixels = archive["faces"]
    else:
        pixels = upright_faces(scipy.io.loadmat(fetch(ORIGINAL))["faces"])
    return torch.from_numpy(pixels.astype(np.float32)) / 255.0


def upright_faces(columns: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(400, 64, 64) from the MATLAB layout (4096, 400): an image a column, its columns stacked."""
    return columns.T.reshape(-1, SIDE, SIDE).transpose(0, 2, 1)


def cut_patches(images: Tensor, patches_per_image: int, seed: int) -> Tensor:
    """Rotated, sub-sampled squares from random places, by bilinear interpolation.

    Patch pixel (u, v), counted from the centre, is the image at c + s R(φ) (u, v), with φ uniform
    in ±90°, s in [1.4, 1.8] and the centre c where all of the patch lies on the image.

    Args:
        images: (images, 64, 64).
        patches_per_image: That many in a row come from each image.
        seed: Seed of φ, s and c.

    Returns:
        (images · patches_per_image, 625).
    """
    count = len(images) * patches_per_image
    generator = torch.Generator().manual_seed(seed)
    angle = (torch.rand(count, generator=generator) - 0.5) * math.pi
    step = SMALLEST_STEP + (LARGEST_STEP - SMALLEST_STEP) * torch.rand(count, generator=generator)
    cos, sin = step * angle.cos(), step * angle.sin()
    reach = (PATCH // 2) * (cos.abs() + sin.abs())  # of the rotated square, along x and y
    place = torch.rand(count, 2, generator=generator)
    centre = reach[:, None] + (SIDE - 1 - 2 * reach[:, None]) * place

    offsets = torch.arange(PATCH) - PATCH // 2
    v, u = torch.meshgrid(offsets, offsets, indexing="ij")  # (25, 25): rows, columns
    patches = torch.empty(count, PATCH * PATCH)
    # An image at a time: the sampling grid of the whole set would be 830 MB.
    for image, rows in zip(images, torch.arange(count).split(patches_per_image), strict=True):
        c, s = cos[rows, None, None], sin[rows, None, None]
        x = centre[rows, 0, None, None] + c * u - s * v  # (patches, 25, 25)
        y = centre[rows, 1, None, None] + s * u + c * v
        grid = torch.stack([x, y], dim=-1) * (2 / (SIDE - 1)) - 1  # pixel centres at ±1
        # The patches as one tall picture, since grid_sample wants as many images as grids.
        sampled = F.grid_sample(
            image[None, None], grid.view(1, -1, PATCH, 2), padding_mode="border", align_corners=True
        )
        patches[rows] = sampled.view(patches_per_image, -1)
    return patches

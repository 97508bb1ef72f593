import functools
import hashlib
import http.server
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from kronfac_experiments.data import faces as faces_module
from kronfac_experiments.data import fetch as fetch_module
from kronfac_experiments.data.curves import curves
from kronfac_experiments.data.faces import cut_patches, faces, olivetti_images
from kronfac_experiments.data.fetch import DataError, DataFile, fetch, find
from kronfac_experiments.data.mnist import TEST_LABELS, mnist, mnist_16x16

UNREACHABLE = "http://127.0.0.1:9/"  # the discard port: refuses at once


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("KRONFAC_DATA", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def mirror(tmp_path):
    """A folder and the address that serves it."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def data_file(content: bytes, *urls: str) -> DataFile:
    return DataFile("set/file.bin", hashlib.sha256(content).hexdigest(), urls)


# --- fetch ------------------------------------------------------------------------------------


def test_finds_a_file_in_the_named_folder_before_the_cache(no_data, tmp_path, monkeypatch):
    file = data_file(b"right")
    for folder in ("named", "cache"):
        (tmp_path / folder / "set").mkdir(parents=True)
        (tmp_path / folder / file.path).write_bytes(b"right")
    assert find(file, tmp_path / "cache") == tmp_path / "cache" / file.path
    monkeypatch.setenv("KRONFAC_DATA", str(tmp_path / "named"))
    assert find(file, tmp_path / "cache") == tmp_path / "named" / file.path
    assert fetch(file, tmp_path / "cache") == tmp_path / "named" / file.path


def test_refuses_a_damaged_file(no_data, tmp_path):
    file = data_file(b"right", UNREACHABLE)
    path = tmp_path / file.path
    path.parent.mkdir()
    path.write_bytes(b"wrong")
    with pytest.raises(DataError) as error:
        fetch(file, tmp_path)
    for part in (str(path), file.sha256, hashlib.sha256(b"wrong").hexdigest()):
        assert part in str(error.value)
    assert path.read_bytes() == b"wrong"


def test_a_missing_file_without_network_says_what_to_put_where(no_data, tmp_path):
    file = replace(TEST_LABELS, urls=(UNREACHABLE + "a", UNREACHABLE + "b"))
    with pytest.raises(DataError) as error:
        fetch(file, tmp_path)
    message = str(error.value)
    assert message.count("(not reached)") == 2
    assert len(message) < 600, "a line to read, not requests' paragraph"
    for part in (*file.urls, str(tmp_path / file.path), "KRONFAC_DATA", file.sha256):
        assert part in message
    assert find(file, tmp_path) is None


def test_downloads_from_the_first_mirror_that_answers_and_only_once(no_data, tmp_path, mirror):
    folder, address = mirror
    (folder / "file.bin").write_bytes(b"right")
    file = data_file(b"right", UNREACHABLE, address + "file.bin")
    cache = tmp_path / "cache"
    assert fetch(file, cache).read_bytes() == b"right"
    (folder / "file.bin").unlink()
    assert fetch(file, cache) == cache / file.path


def test_refuses_a_damaged_download_and_keeps_nothing_of_it(no_data, tmp_path, mirror):
    folder, address = mirror
    (folder / "file.bin").write_bytes(b"wrong")
    file = data_file(b"right", address + "file.bin", address + "absent.bin")
    with pytest.raises(DataError, match=r"sent another file.*status 404"):
        fetch(file, tmp_path / "cache")
    assert find(file, tmp_path / "cache") is None


# --- MNIST ------------------------------------------------------------------------------------


def test_mnist_is_the_known_data_set(real_data):
    train, test = mnist()
    assert train.images.shape == (60_000, 784)
    assert test.images.shape == (10_000, 784)
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    assert train.images.min() == 0
    assert train.images.max() == 1
    # Published: mean and standard deviation of a pixel, and the first labels.
    assert_close(train.images.mean().item(), 0.1307, rtol=0, atol=5e-5)
    assert_close(train.images.std().item(), 0.3081, rtol=0, atol=5e-5)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert train.labels.bincount().tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip


def test_small_mnist_averages_windows_of_the_large_one(real_data):
    small, large = mnist_16x16().test, mnist().test
    assert small.images.shape == (10_000, 256)
    assert torch.equal(small.labels, large.labels)
    image = large.images[3].view(28, 28)
    expected = torch.stack(
        [
            image[
                28 * i // 16 : -(-28 * (i + 1) // 16), 28 * j // 16 : -(-28 * (j + 1) // 16)
            ].mean()
            for i in range(16)
            for j in range(16)
        ]
    )
    assert_close(small.images[3], expected)


# --- CURVES -----------------------------------------------------------------------------------


def principal_component_error(train: torch.Tensor, cases: torch.Tensor, components: int) -> float:
    """Squared error per case of the best linear reconstruction of `train`, on `cases`."""
    mean = train.mean(0)
    basis = torch.linalg.eigh((train - mean).T @ (train - mean)).eigenvectors[:, -components:]
    residual = (cases - mean) - (cases - mean) @ basis @ basis.T
    return residual.square().sum(1).mean().item()


def cross_entropy(targets: torch.Tensor, p: torch.Tensor) -> float:
    terms = torch.special.xlogy(targets, p) + torch.special.xlogy(1 - targets, 1 - p)
    return -terms.sum(1).mean().item()


def test_curves_have_the_statistics_of_the_recipe():
    images = curves(5000).double()
    mean = images.mean(0)
    # The figures of the recipe. Over seeds, 5,000 cases have standard deviations of 0.04, 0.19,
    # 0.15 and 0.02; the rest of the tolerance is for the "about" of the recipe.
    assert_close((images - mean).square().sum(1).mean().item(), 16.8, rtol=0, atol=0.25)
    assert_close(cross_entropy(images, mean.expand_as(images)), 126.0, rtol=0, atol=1.0)
    assert_close(cross_entropy(images, images), 53.0, rtol=0, atol=0.8)
    assert_close(principal_component_error(images, images, 18), 5.94, rtol=0, atol=0.15)


def test_curves_are_images_and_repeat_with_the_seed():
    images = curves(3000, seed=1)
    assert images.shape == (3000, 784)
    assert images.dtype == torch.float32
    assert images.min() >= 0
    assert images.max() == 1
    assert torch.equal(images, curves(3000, seed=1))
    assert not torch.equal(images, curves(3000, seed=2))
    assert torch.equal(images[:2000], curves(2000, seed=1))
    # Two blurs spread ink by two pixels and bilinear dots by one more: the box is 4 … 24 in x.
    assert not images.view(-1, 28, 28)[:, :, [0, 1, 27]].any()


# --- FACES ------------------------------------------------------------------------------------


def test_faces_come_from_the_matlab_file_when_there_is_no_other(no_data, tmp_path, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    upright = np.random.default_rng(0).integers(0, 256, (400, 64, 64), dtype=np.uint8)
    original = tmp_path / faces_module.ORIGINAL.path
    original.parent.mkdir()
    scipy_io.savemat(original, {"faces": upright.transpose(0, 2, 1).reshape(400, 4096).T})
    sha256 = hashlib.sha256(original.read_bytes()).hexdigest()
    monkeypatch.setattr(faces_module, "ORIGINAL", replace(faces_module.ORIGINAL, sha256=sha256))
    monkeypatch.setenv("KRONFAC_DATA", str(tmp_path))
    monkeypatch.setattr(fetch_module, "default_cache", lambda: tmp_path / "cache")
    assert_close(olivetti_images(), torch.from_numpy(upright).float() / 255)


def test_patches_of_a_plane_are_rotated_scaled_planes():
    # Bilinear interpolation is exact on a linear image, so a patch of one is linear itself: its
    # step along each axis is s (cos φ, sin φ), and its corners stay on the image.
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    across, down = (cut_patches(p[None], 200, seed=0).view(-1, 25, 25) for p in (x, y))
    right = torch.stack([across.diff(dim=2), down.diff(dim=2)])  # (2, patches, 25, 24)
    below = torch.stack([across.diff(dim=1), down.diff(dim=1)])
    assert_close(right, right[..., :1, :1].expand_as(right), rtol=0, atol=1e-4)
    assert_close(below, below[..., :1, :1].expand_as(below), rtol=0, atol=1e-4)
    right, below = right[:, :, 0, 0], below[:, :, 0, 0]
    step = right.norm(dim=0)
    assert_close(step, below.norm(dim=0), rtol=0, atol=1e-4)
    assert_close((right * below).sum(0), torch.zeros(200), rtol=0, atol=1e-3)
    assert step.min() >= 1.4 - 1e-4
    assert step.max() <= 1.8 + 1e-4
    assert step.max() - step.min() > 0.35
    assert right[0].min() >= -1e-4  # cos φ ≥ 0: no more than a quarter turn either way
    assert right[1].min() < -1
    assert right[1].max() > 1
    for plane in (across, down):
        assert plane.min() >= 0
        assert plane.max() <= 63


def test_faces_have_the_statistics_of_the_recipe(real_data):
    train, validation, test = faces(patches_per_image=30)
    assert [len(part) for part in (train, validation, test)] == [7500, 1500, 3000]
    everything = torch.cat([train, validation, test]).double()
    assert everything.shape == (12_000, 625)
    assert_close(everything.mean(0), torch.zeros(625, dtype=torch.float64), rtol=0, atol=1e-5)
    assert_close(everything.var(0).mean().item(), 1.0, rtol=0, atol=1e-3)
    # The recipe says about 142 for 414 patches of an image; 30 give 142.2 ± 0.3 over seeds.
    error = principal_component_error(train.double(), test.double(), 30)
    assert_close(error, 142.0, rtol=0, atol=2.0)

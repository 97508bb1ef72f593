"""Many matrices at once: the same numbers as one after the other, whatever runs where."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.testing import assert_close

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import (
    each,
    inverse,
    shift_diagonal,
    shifted_inverses,
)
from kronfac.linalg.parallel import LARGE, _pool
from tests.conftest import ALGEBRA, forked, normal, psd, spd


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


SIZES = (3, LARGE + 40, 3, 5, LARGE, LARGE + 40, 5, 5, 1)


def test_results_come_in_the_order_of_the_matrices(threads):
    matrices = [torch.zeros(n, 1) for n in SIZES]

    def work(M, index):
        time.sleep(0.01 if index % 2 else 0.0)  # so that they don't end in the order they began
        return index, len(M)

    assert each(work, matrices, range(len(SIZES))) == list(enumerate(SIZES))


def test_large_matrices_are_worked_on_at_the_same_time():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _pool.cache_clear()  # so that this makes one
        both = threading.Barrier(2)  # passed by two at once, or not at all
        settings = each(
            lambda M: (both.wait(timeout=30), torch.get_num_threads())[1],
            [torch.zeros(LARGE, 1)] * 2,
        )
        assert settings == [1, 1]
        assert torch.get_num_threads() == 2
        seen = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [2]  # what other threads begin with is as it was
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_for_gradients_goes_along(threads, enabled):
    with torch.set_grad_enabled(enabled):
        found = each(lambda M: torch.is_grad_enabled(), [torch.zeros(LARGE, 1)] * 2)
    assert found == [enabled, enabled]


def test_the_first_error_in_the_order_of_the_matrices_is_raised(threads):
    def work(M, index):
        time.sleep(0.02 if index == 1 else 0.0)
        if index:
            raise ValueError(f"number {index}")

    with pytest.raises(ValueError, match="number 1"):
        each(work, [torch.zeros(LARGE, 1)] * 4, range(4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_process():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    matrices = [spd(LARGE)] * 2
    try:
        expected = each(torch.linalg.cholesky, matrices)  # the pool is there
        found = forked(
            lambda: sum(map(torch.equal, each(torch.linalg.cholesky, matrices), expected))
        )
        assert found == 2
    finally:
        torch.set_num_threads(before)


def test_in_a_thread_that_goes_on_when_python_ends():
    """Where pools take no more work."""
    script = """if True:
        import threading, time, torch
        from kronfac.linalg import each, in_background
        torch.set_num_threads(2)
        def late():
            threading.main_thread().join()
            time.sleep(0.2)
            print(each(len, [torch.zeros(200, 1)] * 2), in_background(int))
        each(len, [torch.zeros(200, 1)] * 2)
        threading.Thread(target=late).start()
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "[200, 200] None\n"


def _shifted():
    matrices = [psd(n, max(n // 2, 1), seed=i) for i, n in enumerate(SIZES)]
    shifts = [torch.tensor(0.1 * (i + 1), dtype=torch.float64) for i in range(len(SIZES))]
    return matrices, shifts, [f"M[{i}]" for i in range(len(SIZES))]


def test_shifted_inverses(threads):
    matrices, shifts, names = _shifted()
    kept = [M.clone() for M in matrices]
    found = shifted_inverses(matrices, shifts, names)
    for M, shift, inverted in zip(matrices, shifts, found, strict=True):
        expected = torch.linalg.inv(M + shift * torch.eye(len(M), dtype=M.dtype))
        assert_close(inverted, expected, **ALGEBRA)
        assert torch.equal(inverted, inverted.mT)
    assert all(map(torch.equal, matrices, kept))


def test_inverses_in_place_are_those_of_copies_to_the_last_bit(threads):
    matrices, shifts, names = _shifted()
    large = [i for i, M in enumerate(matrices) if len(M) >= LARGE]
    found = shifted_inverses(matrices, shifts, names)
    torch.set_num_threads(1)  # as for each of them
    for i in large:
        assert torch.equal(found[i], inverse(shift_diagonal(matrices[i], shifts[i])))


@pytest.mark.parametrize("size", [30, LARGE + 40])
def test_a_matrix_that_only_float64_can_invert_in_place(size):
    A = psd(size, size * 2 // 3).float()
    assert int(torch.linalg.cholesky_ex(A)[1]) != 0
    (found,) = shifted_inverses([A], [torch.zeros(())], ["A"])
    assert torch.equal(found, inverse(A))


def test_small_matrices_of_one_shape_are_inverted_in_one_call(monkeypatch):
    shapes = []
    genuine = torch.linalg.cholesky_ex

    def counting(M, **more):
        shapes.append(tuple(M.shape))
        return genuine(M, **more)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counting)
    shifted_inverses(*_shifted())
    n = LARGE + 40
    assert sorted(shapes) == [(1, 1), (2, 3, 3), (3, 5, 5), (LARGE, LARGE), (n, n), (n, n)]


def test_a_matrix_that_float32_finds_indefinite_does_not_spoil_those_of_its_shape(threads):
    A = psd(30, 20).float()
    assert int(torch.linalg.cholesky_ex(A)[1]) != 0
    good = spd(30).float()
    none = torch.zeros(())
    found = shifted_inverses([good, A, good], [none] * 3, ["a", "b", "c"])
    assert_close(found[0].double(), torch.linalg.inv(good.double()), rtol=1e-4, atol=1e-6)
    assert torch.equal(found[0], found[2])
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("size", [4, LARGE])
def test_a_matrix_that_cannot_be_inverted_leaves_its_error_in_its_place(threads, size):
    none = torch.zeros((), dtype=torch.float64)
    bad, indefinite = spd(size), spd(size) - 3 * size * torch.eye(size, dtype=torch.float64)
    bad[1, 1] = torch.nan
    names = ["first", "second", "third"]
    for number, matrix, kind in (
        (1, bad, NonFiniteError),
        (2, indefinite, NotPositiveDefiniteError),
    ):
        matrices = [spd(size)] * 3
        matrices[number] = matrix
        found = shifted_inverses(matrices, [none] * 3, names)
        assert isinstance(found[number], kind)
        assert names[number] in str(found[number])
        assert found[number].__traceback__ is None  # which would hold what it was computed from
        for i in {0, 1, 2} - {number}:  # the others are what they are without it
            assert_close(found[i], torch.linalg.inv(spd(size)), rtol=1e-9, atol=1e-11)


def test_as_many_of_everything(threads):
    with pytest.raises(ValueError, match="shorter"):
        each(lambda M, name: name, [normal(2, 2)] * 2, ["only one"])

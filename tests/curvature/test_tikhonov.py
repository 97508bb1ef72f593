import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kronfac.curvature import FactoredTikhonov
from kronfac.curvature.tikhonov import pi
from tests.conftest import ALGEBRA, psd, spd
from tests.reference import dense

NORMS = ["trace", "one"]


@pytest.mark.parametrize(("size_A", "size_G"), [(5, 3), (2, 6), (1, 1)])
def test_pi_is_the_ratio_of_norms_of_the_dense_products(size_A, size_G):
    A, G = 7.0 * spd(size_A), spd(size_G, seed=1)
    assert_close(pi(A, G), dense.pi(A, G), **ALGEBRA)


def test_pi_minimises_the_bound_on_the_residual():
    """π γ ‖I ⊗ G‖ + γ/π ‖A ⊗ I‖ is smallest at π [MG15 §6.3]."""
    A, G = psd(4, 2), 0.01 * spd(3, seed=1)
    norm_A = torch.linalg.matrix_norm(dense.kron(A, torch.eye(3).double()), "nuc")
    norm_G = torch.linalg.matrix_norm(dense.kron(torch.eye(4).double(), G), "nuc")

    def bound(ratio):
        return ratio * norm_G + norm_A / ratio

    best = pi(A, G)
    assert bound(best) < bound(best * 1.01)
    assert bound(best) < bound(best / 1.01)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 12.0])
def test_damp_adds_to_the_diagonals(norm, gamma):
    A, G = spd(4), psd(3, 1, seed=1)
    damped_A, damped_G = FactoredTikhonov(norm).damp(A, G, gamma)
    expected_A, expected_G = dense.factored_tikhonov([[A]], [[G]], gamma, norm)
    assert_close(damped_A, expected_A[0][0], **ALGEBRA)
    assert_close(damped_G, expected_G[0][0], **ALGEBRA)
    assert torch.equal(A, spd(4))  # the running averages are not touched


@given(st.floats(-30, 30), st.floats(-30, 30))
def test_damping_follows_the_units_of_the_factors(log_a, log_g):
    """Scaling A by a and G by g scales A ⊗ G by ag; γ √(ag) then damps as before, up to that scale."""
    a, g = 2.0**log_a, 2.0**log_g
    A, G = spd(3), spd(2, seed=1)
    plain = FactoredTikhonov().damp(A, G, 0.3)
    scaled = FactoredTikhonov().damp(a * A, g * G, 0.3 * (a * g) ** 0.5)
    assert_close(dense.kron(*scaled) / (a * g), dense.kron(*plain), rtol=1e-10, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_no_gradient_reaches_stays_finite(norm, dtype):
    A, G = spd(3).to(dtype), torch.zeros(2, 2, dtype=dtype)
    for damped in FactoredTikhonov(norm).damp(A, G, 0.3):
        assert damped.isfinite().all()
        assert torch.linalg.eigvalsh(damped)[0] > 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("scale_A", "scale_G"), [(1e20, 1.0), (1.0, 1e20), (1e21, 1e-18)])
def test_factors_of_inputs_of_1e10_overflow_nothing_in_float32(norm, scale_A, scale_G):
    A, G = scale_A * spd(5), scale_G * spd(3, seed=1)
    ratio = pi(A.float(), G.float())
    assert ratio.dtype == torch.float32
    assert_close(ratio.double(), dense.pi(A, G), rtol=1e-6, atol=0)
    for damped in FactoredTikhonov(norm).damp(A.float(), G.float(), 0.3):
        assert damped.isfinite().all()


def test_a_diagonal_factor_is_damped_as_the_matrix_it_stands_for():
    a, G = spd(4).diagonal(), spd(3, seed=1)
    assert_close(pi(a, G), dense.pi(torch.diag(a), G), **ALGEBRA)
    assert_close(pi(G, a), dense.pi(G, torch.diag(a)), **ALGEBRA)


def test_unknown_norm():
    with pytest.raises(ValueError, match="norm is one of"):
        FactoredTikhonov("nuclear")

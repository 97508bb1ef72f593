import pytest
import torch
from matplotlib.figure import Figure

from kronfac_experiments.diagnostics import BlockMatrix, draw_absolute, plots, white_level
from tests.conftest import normal


def test_white_level_is_a_quantile_of_absolute_values():
    M = BlockMatrix(torch.arange(-50.0, 50.0).reshape(10, 10), ("a",), (10,))
    assert white_level(M, 1.0) == 50
    assert white_level(M, 0.5) == 25
    with pytest.raises(ValueError, match="quantile"):
        white_level(M, 0.0)


def test_draws_absolute_values_with_a_dashed_line_between_layers():
    M = BlockMatrix(normal(5, 5), ("first", "second"), (3, 2))
    axes = Figure().subplots()
    image = draw_absolute(axes, M, maximum=2.0)
    assert torch.equal(torch.as_tensor(image.get_array()), M.dense.abs())
    assert image.get_clim() == (0.0, 2.0)
    assert [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0] > 0] == [2.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "second"]


def test_large_matrices_are_averaged_down(monkeypatch):
    monkeypatch.setattr(plots, "MAX_PIXELS", 3)
    M = BlockMatrix(normal(6, 6), ("a",), (6,))
    image = draw_absolute(Figure().subplots(), M)
    expected = M.dense.abs().reshape(3, 2, 3, 2).mean(dim=(1, 3))
    torch.testing.assert_close(torch.as_tensor(image.get_array()), expected)
    assert image.get_extent() == [-0.5, 5.5, 5.5, -0.5]

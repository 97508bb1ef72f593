"""`kronfac bench growth` measures and writes a page with its picture."""

import math

import pytest

from kronfac_experiments.bench.power_law import standard_error
from tests.experiments.runs import kronfac


@pytest.mark.slow
def test_it_measures_and_writes_the_page(tmp_path):
    page = tmp_path / "page.md"
    sizes = ("--widths", "16", "--depths", "1", "--extents", "32", "--base", "16", "1", "32")
    arguments = (*sizes, "--batch", "4", "--repeats", "1", "--steps", "1", "--warm-up", "1")
    folder = str(tmp_path / "runs")
    kronfac("bench", "growth", *arguments, "--output", str(page), "--run-dir", folder)
    text = page.read_text()
    assert "## Transformer by sequence length" in text
    assert "## Residual network by image side" in text
    assert page.with_suffix(".png").is_file()


def test_the_standard_error_is_zero_on_a_line_and_known_beside_it():
    x = [1.0, math.e, math.e**2]
    assert standard_error(x, [2 * v**1.5 for v in x]) == pytest.approx(0, abs=1e-12)
    # Residuals of (0, 1, 0) about its mean 1/3: 6/9, over 1 degree of freedom and Σ(x − x̄)² = 2.
    assert standard_error(x, [1.0, math.e, 1.0]) == pytest.approx(math.sqrt(6 / 9 / 2))
    assert math.isnan(standard_error(x[:2], [1.0, 2.0]))

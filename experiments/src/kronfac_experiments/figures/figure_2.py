"""Figure 2: the exact Fisher F, its approximation F̃, and their difference [MG15 §3]."""

from pathlib import Path

from kronfac_experiments.diagnostics import (
    ApproximationError,
    cumulants,
    exact_fisher,
    kronecker_fisher,
)
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.figures.network import example
from kronfac_experiments.figures.panels import draw_row, new_figure, white_level

PAPER_ERROR, PAPER_BOUND = 2894.4, 4134.6  # [MG15 §3.1]


def make(config: FigureConfig) -> list[Path]:
    """|F|, |F̃| and |F − F̃| in the same grey levels; Σ |F − F̃| beside its bound by cumulants."""
    network = example(config)
    F = exact_fisher(network.examples)
    F_tilde = kronecker_fisher(network.examples).dense()
    error = ApproximationError.of(F, F_tilde, cumulants(network.examples))
    numbers = [
        Number("total approximation error, Σ |F − F̃|", error.total, PAPER_ERROR),
        Number("its bound by cumulants", error.bound, PAPER_BOUND),
        Number("bound / error", error.bound / error.total, PAPER_BOUND / PAPER_ERROR),
        Number("part of the bound of fourth order, Σ |κ₄|", error.fourth_order),
        Number("Σ |F|", float(F.dense.abs().sum())),
        Number("Σ |F̃|", float(F_tilde.dense.abs().sum())),
        Number("Σ |F − F̃| / Σ |F|", error.relative),
        Number("‖F − F̃‖ / ‖F‖, Frobenius", error.relative_frobenius),
        Number("training error, %", network.error, 5.0),
        Number("γ", network.gamma),
    ]
    for i in range(F.layers):
        for j in range(F.layers):
            block = f"of the block of layers {i + 2} and {j + 2}"
            numbers.append(Number(f"Σ |F − F̃| {block}", float(error.total_by_block[i, j])))
            numbers.append(Number(f"bound {block}", float(error.bound_by_block[i, j])))

    title = "Figure 2: the exact Fisher and its Kronecker-factored approximation"
    figure, axes = new_figure(title, network.setting)
    draw_row(
        axes[0],
        [F, F_tilde, F - F_tilde],
        ["$|F|$", r"$|\tilde{F}|$", r"$|F-\tilde{F}|$"],
        white_level(F),
        "absolute value",
    )
    axes[0][2].set_xlabel(
        f"total {error.total:,.1f} (paper {PAPER_ERROR:,.1f}), "
        f"bound {error.bound:,.1f} (paper {PAPER_BOUND:,.1f})",
        fontsize=9,
    )
    return publish(config, figure, f"{title}\n{network.setting}", numbers, numbers[:10])

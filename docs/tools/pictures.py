"""Pictures of the documentation, drawn from committed results and from small runs. `make figures` runs it.

Each is drawn twice, for light and dark pages; Markdown picks one by `#only-light` or `#only-dark`.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
import torch
from flow_chart import flow_chart
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import kronfac

DOCS = Path(__file__).resolve().parents[1]
PICTURES = DOCS / "pictures"


@dataclass(frozen=True)
class Colours:
    """What a picture is drawn with on one kind of page."""

    text: str
    grid: str
    kfac: str
    others: tuple[str, ...]


THEMES = {
    "light": Colours("#1f2430", "#d5d8e0", "#4338ca", ("#c2410c", "#7c8294", "#0f766e")),
    "dark": Colours("#e4e6ee", "#4a4f60", "#a5b4fc", ("#fb923c", "#9aa1b5", "#5eead4")),
}


RACERS = {"K-FAC": "kronfac, defaults", "kfac-jax": "kfac-jax, tuned", "AdamW": "AdamW, tuned"}
"""Rows of the page, and what the picture calls them."""


def main() -> None:
    """Draw everything."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "options.svg").write_text(flow_chart())
    for name, draw in (("front", front), ("mnist", mnist), ("valley", valley)):
        for theme, colours in THEMES.items():
            with plt.rc_context(style(colours)):
                save(draw(colours), PICTURES / f"{name}_{theme}.svg")


def style(colours: Colours) -> dict[str, object]:
    """Settings of matplotlib: text as text, no background, the same file every time."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "kronfac",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": colours.grid,
        "axes.labelcolor": colours.text,
        "axes.titlecolor": colours.text,
        "text.color": colours.text,
        "xtick.color": colours.text,
        "ytick.color": colours.text,
        "grid.color": colours.grid,
        "savefig.transparent": True,
    }


def save(figure: Figure, path: Path) -> None:
    """Write an SVG file without dates, in the fonts of the page."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = path.read_text()
    text = re.sub(r"'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif", text)
    path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))


def front(colours: Colours) -> Figure:
    """Seconds to a training error of 4, from results/race_mnist.md."""
    page = (DOCS / "results" / "race_mnist.md").read_text()
    budget = 150.0
    bars: list[tuple[str, float, bool]] = []
    for name, label in RACERS.items():
        cell = re.search(rf"^\| {name} \| [^|]+ \| 4 \| ([^|]+) \|", page, flags=re.MULTILINE)
        assert cell, name
        reached = re.match(r"[\d.]+", cell[1].strip())
        bars.append((label, float(reached[0]) if reached else budget, bool(reached)))
    figure, axes = plt.subplots(figsize=(6, 1.9))
    for row, (label, seconds, reached_it) in enumerate(bars):
        colour = colours.kfac if row == 0 else colours.others[1]
        axes.barh(-row, seconds, 0.62, color=colour, alpha=1.0 if reached_it else 0.45)
        said = f"{seconds:.1f} s" if reached_it else f"not in {budget:.0f} s"
        axes.text(seconds + 2, -row, said, va="center", weight="bold" if row == 0 else "normal")
        axes.text(-2, -row, label, va="center", ha="right", weight="bold" if row == 0 else "normal")
    axes.set_xlim(0, 185)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(
        "seconds to a training error of 4 on the MNIST autoencoder\n(2 CPU threads, median of 3 seeds)"
    )
    return figure


def mnist(colours: Colours) -> Figure:
    """Training error against seconds and iterations, from results/mnist_comparison.csv."""
    with (DOCS / "results" / "mnist_comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    looks = {
        "K-FAC, block-diagonal": ("K-FAC", colours.kfac),
        "AdamW": ("AdamW", colours.others[0]),
        "Nesterov momentum": ("Nesterov momentum", colours.others[1]),
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, quantity in zip(panels, ("seconds", "iteration"), strict=True):
        for method, (label, colour) in looks.items():
            curves = defaultdict(list)
            for row in rows:
                if row["method"] == method:
                    curves[row["seed"]].append((float(row[quantity]), float(row["error"])))
            for seed, curve in curves.items():
                x, y = zip(*curve, strict=True)
                axes.plot(x, y, color=colour, linewidth=1.6, label=label if seed == "0" else None)
        axes.set_yscale("log")
        axes.grid(axis="y", linewidth=0.6)
        axes.set_yticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
        axes.minorticks_off()
    panels[0].set(xlabel="seconds", ylabel="training error", xlim=(0, 300))
    panels[1].set(xlabel="iterations", xlim=(0, 1000))
    panels[0].legend(frameon=False)
    return figure


def valley(colours: Colours) -> Figure:
    """Paths of three optimizers on a loss of two parameters, one direction steep and one flat."""
    torch.manual_seed(0)
    x = torch.randn(512, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.25]])
    best = torch.tensor([1.0, -0.5])
    y = x @ best[:, None]
    figure, panels = plt.subplots(1, 3, figsize=(9.2, 3.2), sharey=True, layout="constrained")
    runs: list[tuple[str, str, Callable[[nn.Module], Callable[[], object]], int]] = [
        ("gradient descent", colours.others[1], lambda m: _descent(m, x, y, 0.5), 40),
        ("Adam", colours.others[0], lambda m: _adam(m, x, y, 0.2), 40),
        ("K-FAC", colours.kfac, lambda m: _kfac(m, x, y), 8),
    ]
    for axes, (name, colour, make, steps) in zip(panels, runs, strict=True):
        path = _path(make, steps)
        _contours(axes, x, y, colours)
        axes.plot(*zip(*path, strict=True), "o-", color=colour, markersize=3.5, linewidth=1.4)
        axes.plot(*best, marker="*", markersize=12, color=colours.text, linestyle="none")
        axes.set_title(f"{name}: {steps} steps", fontsize=11)
        axes.set(xticks=[], yticks=[], xlim=(-2.6, 2.6), ylim=(-3, 3))
        axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _contours(axes: Axes, x: Tensor, y: Tensor, colours: Colours) -> None:
    u, v = torch.meshgrid(torch.linspace(-2.6, 2.6, 80), torch.linspace(-3, 3, 80), indexing="xy")
    weights = torch.stack([u.flatten(), v.flatten()])
    loss = (x @ weights - y).square().mean(dim=0).reshape(u.shape)
    levels = [0.02 * 3**k for k in range(7)]
    axes.contour(u, v, loss, levels=levels, colors=colours.others[1], alpha=0.55, linewidths=0.8)


def _path(make: Callable[[nn.Module], Callable[[], object]], steps: int) -> list[tuple[float, ...]]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, -2.0)
    with torch.no_grad():
        model.weight[0, 1] = 2.4
    step = make(model)
    path = [tuple(model.weight[0].tolist())]
    for _ in range(steps):
        step()
        path.append(tuple(model.weight[0].tolist()))
    return path


def _descent(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> Callable[[], object]:
    return _first_order(torch.optim.SGD(model.parameters(), lr=lr), model, x, y)


def _adam(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> Callable[[], object]:
    return _first_order(torch.optim.Adam(model.parameters(), lr=lr), model, x, y)


def _first_order(
    optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor
) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def _kfac(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer = kronfac.KFAC(model, nn.MSELoss())
    return lambda: optimizer.step(optimizer.closure(x, y))


if __name__ == "__main__":
    main()

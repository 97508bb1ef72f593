"""Pictures of the documentation, drawn from committed results and from small runs. `make figures` runs it.

Each is drawn twice, for light and dark pages; Markdown picks one by `#only-light` or `#only-dark`.
"""

import json
import re
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
from kronfac_experiments.race.records import SECONDS, STEP, TRAINING

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


def main() -> None:
    """Draw everything."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "options.svg").write_text(flow_chart())
    for name, draw in (("step_cost", step_cost), ("mnist", mnist), ("valley", valley)):
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


def step_cost(colours: Colours) -> Figure:
    """A step of K-FAC by part in steps of SGD, from the table of results/step_cost.md."""
    page = (DOCS / "results" / "step_cost.md").read_text().split("## By part")[1]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head, *parts = [row for row in rows if not row[0].startswith("-")]
    names = ["block-diagonal, m = 1000", "m = 5000", "block-tridiagonal, m = 1000", "m = 5000"]
    assert head[1:] == names
    figure, axes = plt.subplots(figsize=(7.5, 2.4))
    shades = (colours.kfac, *colours.others)
    for row, _ in enumerate(names):
        left = 0.0
        for index, (part, *lengths) in enumerate(parts):
            length = float(lengths[row])
            axes.barh(
                -row,
                length,
                0.6,
                left=left,
                color=shades[index % len(shades)],
                alpha=1.0 if index < len(shades) else 0.5,
                label=None if row else part,
            )
            left += length
        axes.text(left + 0.05, -row, f"{left:.1f}", va="center")
    axes.set_yticks([-row for row, _ in enumerate(names)], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("steps of SGD")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def mnist(colours: Colours) -> Figure:
    """Training error against seconds and iterations, from results/runs/autoencoders.jsonl."""
    lines = (DOCS / "results" / "runs" / "autoencoders.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run.get("budget") == {"seconds": 300.0}]
    looks = {
        "kfac-paper": ("K-FAC", colours.kfac),
        "adamw": ("AdamW", colours.others[0]),
        "nag": ("Nesterov momentum", colours.others[1]),
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, column in zip(panels, (SECONDS, STEP), strict=True):
        for run in runs:
            if run["contestant"] in looks:
                label, colour = looks[run["contestant"]]
                shown = None if run["seed"] else label
                x, y = zip(*((row[column], row[TRAINING]) for row in run["rows"]), strict=True)
                axes.plot(x, y, color=colour, linewidth=1.6, label=shown)
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

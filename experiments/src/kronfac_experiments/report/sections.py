"""The sections of the page below the summary, each left out if the runs have nothing for it. HTML."""

from collections.abc import Iterable
from html import escape
from typing import Any

from kronfac_experiments.pages.styles import run_styles
from kronfac_experiments.report.pictures import gallery
from kronfac_experiments.report.runs import Run
from kronfac_experiments.report.tables import configuration_table, parts_table

AXIS_LABELS = {"iteration": "iterations", "cases": "cases", "seconds": "seconds"}
ERROR_LABELS = {
    "train_error": ("training", "solid"),
    "test_error": ("test", "dash"),
    "averaged_train_error": ("averaged training", "dot"),
    "averaged_test_error": ("averaged test", "dashdot"),
}
DASHES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}

# Heading, scale if the values allow it, and what the number is.
TRACES = {
    "lambda": ("λ", "log", "damping of the quadratic model, after the step"),
    "gamma": ("γ", "log", "damping of the approximate inverse"),
    "alpha": ("α", "log", "coefficient of the new direction; others: their learning rate"),
    "mu": ("μ", "linear", "coefficient of the previous update"),
    "rho": ("ρ", "linear", "change of the objective over the predicted one"),
    "loss": ("Loss", "log", "of the mini-batch, before the step"),
    "batch": ("Mini-batch", "linear", "cases in a step"),
}


def axis_controls(axes: Iterable[str]) -> list[str]:
    """Buttons for the axes of the error plots; the first of `axes` is pressed."""
    return [
        _group("x", "Against", "one", [(axis, AXIS_LABELS[axis]) for axis in axes]),
        _group("y-scale", "Error axis", "one", [("log", "log"), ("linear", "linear")]),
        _group("x-scale", "Lower axis", "one", [("linear", "linear"), ("log", "log")]),
    ]


def error_section(data: dict[str, Any]) -> tuple[str, str, str]:
    """Error curves and the buttons that rule all plots: anchor, heading, HTML."""
    shown = [name for name in ERROR_LABELS if any(name in run["errors"] for run in data["runs"])]
    if not shown:
        return "errors", "Error", '<p class="note">No error has been evaluated yet.</p>'
    styles = run_styles(len(data["runs"]))
    groups = [
        *axis_controls(data["axes"]),
        _group(
            "quantity",
            "Error",
            "many",
            [(name, _dashes(ERROR_LABELS[name][1]) + ERROR_LABELS[name][0]) for name in shown],
        ),
    ]
    if len(styles) > 1:
        runs = [
            (str(index), style.swatch + escape(run["name"]))
            for index, (run, style) in enumerate(zip(data["runs"], styles, strict=True))
        ]
        groups.append(_group("run", "Runs", "many", runs, pressed=len(runs)))
    drawn = plot(
        "error-plot",
        "Error curves of the runs; the last values are in the summary table.",
        errors="",
    )
    return (
        "errors",
        "Error",
        f'<div class="controls">{"".join(groups)}</div>{drawn}'
        '<p class="note">The error of autoencoders is the squared reconstruction error a case, summed '
        "over pixels; that of classifiers is the percentage of wrong answers. Point at a curve or tap "
        "it for values; with a mouse, drag to zoom and double-click to go back.</p>",
    )


def trace_section(data: dict[str, Any]) -> tuple[str, str, str] | None:
    """λ, γ, α, μ, ρ and the loss, a small plot each."""
    plots = [
        f'<figure><figcaption><h3>{heading}</h3><span class="note">{meaning}</span></figcaption>'
        + plot(f"trace-{name}", f"{heading} over training: {meaning}.", scale=scale, trace=name)
        + "</figure>"
        for name, (heading, scale, meaning) in TRACES.items()
        if any(name in run["traces"] for run in data["runs"])
    ]
    if not plots:
        return None
    note = (
        "Only runs that have the quantity; against the same axis as the error. Long runs are thinned, the "
        "lowest and highest values of every stretch kept."
    )
    if any("rho" in run["traces"] for run in data["runs"]):
        note += (
            " Dotted in the plot of ρ: λ grows below ¼ and shrinks above ¾; what lies outside −1…3 is "
            "drawn at the edge."
        )
    note = f'<p class="note">{note}</p>'
    return "steps", "Step by step", f'{note}<div class="multiples">{"".join(plots)}</div>'


def time_section(runs: list[Run]) -> tuple[str, str, str] | None:
    """Milliseconds an iteration by part."""
    timed = [run for run in runs if run.parts]
    if not timed:
        return None
    drawn = plot(
        "time-plot", "Milliseconds an iteration by part; the numbers are in the table below."
    )
    table = f"<details><summary>The numbers as a table</summary>{parts_table(timed)}</details>"
    return "time", "Time by part", drawn + table


def picture_section(runs: list[Run]) -> tuple[str, str, str] | None:
    """Reconstructions of the same test cases over training."""
    galleries = "".join(gallery(run) for run in runs)
    if not galleries:
        return None
    note = '<p class="note">Test cases on top, below them what the network made of them.</p>'
    return "pictures", "Reconstructions", f'{note}<div class="galleries">{galleries}</div>'


def configuration_section(runs: list[Run]) -> tuple[str, str, str] | None:
    """Settings side by side."""
    if not any(run.config for run in runs):
        return None
    table = configuration_table(runs)
    button = (
        '<div class="controls"><button type="button" id="only-differences" aria-pressed="false">'
        "only what differs</button></div>"
        if len(runs) > 1
        else ""
    )
    return "configuration", "Configuration", button + table


def _group(
    control: str, label: str, kind: str, buttons: Iterable[tuple[str, str]], pressed: int = 1
) -> str:
    """Buttons of which `one` or `many` can be pressed; the first `pressed` of them are."""
    return (
        f'<div class="group" role="group" aria-label="{label}" data-kind="{kind}">'
        f'<span class="label" aria-hidden="true">{label}</span><span class="buttons">'
        + "".join(
            f'<button type="button" data-control="{control}" data-value="{value}" '
            f'aria-pressed="{"true" if place < pressed else "false"}">{content}</button>'
            for place, (value, content) in enumerate(buttons)
        )
        + "</span></div>"
    )


def _dashes(name: str) -> str:
    return (
        '<svg class="swatch" viewBox="-14 -6 28 12" aria-hidden="true"><path d="M-13,0h26" '
        f'stroke="currentColor" stroke-width="2" stroke-dasharray="{DASHES[name]}"/></svg>'
    )


def plot(name: str, label: str, **settings: str) -> str:
    """A place for `page.js` to draw in; `errors` is the group of runs whose error curves go there."""
    extra = "".join(f' data-{key}="{value}"' for key, value in settings.items())
    return f'<div class="plot" id="{name}" role="img" aria-label="{escape(label)}"{extra}></div>'

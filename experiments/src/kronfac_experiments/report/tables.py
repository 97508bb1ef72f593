"""The tables of the page: who came how far, time by part, configurations side by side."""

import json
import math
from html import escape
from typing import Any

from kronfac_experiments.pages.page import scrolling_table
from kronfac_experiments.report.runs import Run

MISSING = "—"

SUMMARY_HEADINGS = (
    "run",
    "training error",
    "averaged",
    "better of both",
    "test error",
    "iterations",
    "cases",
    "seconds",
)


def better_error(run: Run) -> float | None:
    """The last training error, current or averaged, whichever is smaller [MG15 §13]."""
    errors = [run.last("train_error"), run.last("averaged_train_error")]
    return min((error for error in errors if error is not None), default=None)


def best_first(runs: list[Run]) -> list[Run]:
    """By training error within a problem, since errors of two problems cannot be compared.

    Where no run of a problem has a training error, by test error. What diverged comes after what did
    not, what was never evaluated last.
    """
    problems = list(dict.fromkeys(run.setting("problem") for run in runs))

    def key(run: Run) -> tuple[int, float, bool, float]:
        error, test = better_error(run), run.last("test_error")
        return (
            problems.index(run.setting("problem")),
            math.inf if error is None else error,
            error is None,
            math.inf if test is None else test,
        )

    return sorted(runs, key=key)


def verdict(runs: list[Run]) -> str:
    """The outcome in a sentence for each problem; `runs` are best first. HTML."""
    sentences = []
    for problem in dict.fromkeys(run.setting("problem") for run in runs):
        contenders = [run for run in runs if run.setting("problem") == problem]
        best, others = contenders[0], contenders[1:]
        error = better_error(best)
        if error is None or not math.isfinite(error):
            sentences.append("No run has a finite training error yet.")
            continue
        where = f" on {escape(problem)}" if problem else ""
        sentence = (
            f"{'Lowest' if others else 'Last'} training error{where}: "
            f"<strong>{number(error)}</strong> by <strong>{escape(best.name)}</strong>"
        )
        runner_up = better_error(others[0]) if others else None
        if runner_up is not None and math.isfinite(runner_up) and error > 0:
            sentence += f"; the next, {escape(others[0].name)}, ended at {number(runner_up)}"
        sentences.append(sentence + ".")
    if len({run.setting("problem") for run in runs}) > 1:
        sentences.append("Errors of different problems cannot be compared.")
    return " ".join(dict.fromkeys(sentences))


def summary_table(runs: list[Run], colours: dict[str, str]) -> str:
    """A row a run, in the order given; `colours` are those of the runs' lines."""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in SUMMARY_HEADINGS)
    body = []
    for run in runs:
        settings = [run.setting(name) for name in ("problem", "optimizer", "inverse", "preset")]
        below = " · ".join(escape(setting) for setting in settings if setting)
        errors = (run.last("train_error"), run.last("averaged_train_error"), better_error(run))
        cells = [
            *(number(value) for value in (*errors, run.last("test_error"))),
            *(whole(run.last(name)) for name in ("iteration", "cases")),
            number(run.last("seconds")),
        ]
        body.append(
            f'<tr><th scope="row"><div class="run-name"><span class="swatch" '
            f'style="background: {colours[run.name]}"></span>'
            f"{escape(run.name)}<small>{below}</small></div></th>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return scrolling_table("Runs, best first", f"<tr>{head}</tr>", body, "summary-table")


def parts_table(runs: list[Run]) -> str:
    """Milliseconds an iteration: a row a part, a column a run."""
    names = list(dict.fromkeys(part for run in runs for part in run.parts))
    rows = [
        f'<tr><th scope="row">{escape(words(part))}</th>'
        + "".join(f"<td>{number(run.parts.get(part))}</td>" for run in runs)
        + "</tr>"
        for part in names
    ]
    sums = "".join(f"<td>{number(sum(run.parts.values()))}</td>" for run in runs)
    rows.append(f'<tr class="sum"><th scope="row">together</th>{sums}</tr>')
    head = '<tr><th scope="col">part</th>' + _run_headings(runs) + "</tr>"
    return scrolling_table("Milliseconds an iteration by part", head, rows, "parts-table")


def configuration_table(runs: list[Run]) -> str:
    """A row a setting, a column a run; rows that are not the same in all runs are marked."""
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = []
    for key in keys:
        values = [settings.get(key, MISSING) for settings in flat]
        differs = len(set(values)) > 1
        mark = '<span class="mark" role="img" aria-label="differs">≠</span> ' if differs else ""
        rows.append(
            f'<tr{" class=differs" if differs else ""}><th scope="row">{mark}{escape(key)}</th>'
            + "".join(f"<td>{escape(value)}</td>" for value in values)
            + "</tr>"
        )
    head = '<tr><th scope="col">setting</th>' + _run_headings(runs) + "</tr>"
    return scrolling_table("Configuration", head, rows, "configuration-table")


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}, without nulls; lists and empty objects stay in one piece."""
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if not prefix or value is None:
        return {}
    return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def number(value: float | None) -> str:
    """Four significant digits, or words."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 - (math.floor(math.log10(abs(value))) if value else 0)
        return f"{value:,.{max(digits, 0)}f}"
    return f"{value:.3e}"


def whole(value: float | None) -> str:
    """With commas, or words."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else number(value)


def words(name: str) -> str:
    """A name of the program as words."""
    return name.replace("_", " ")


def _run_headings(runs: list[Run]) -> str:
    return "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)

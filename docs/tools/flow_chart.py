"""The flow chart of which_options.md, as SVG text that reads on light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 890
ROW = 84
BOX = 56
QUESTION = (20, 330)  # left edge and width
ANSWER = (460, 410)
COLOURS = {
    "start": ("#3730a3", "#ffffff"),
    "question": ("#e0e7ff", "#1e1b4b"),
    "answer": ("#ffedd5", "#431407"),
}
"""Fill and ink of a box."""
LINE = "#8a90a2"


@dataclass(frozen=True)
class Question:
    """One row: a question, and what to do if the answer is yes."""

    asked: Sequence[str]
    remedy: Sequence[str]


ROWS = (
    Question(("Is the loss one of torch's,", "or a likelihood?"), ()),
    Question(
        ("Does print(kronfac.plan(…))", "show a fallback you mind?"),
        (
            "give the layer an adapter: kronfac.register;",
            'Blocks(unsupported="refuse") to have an error',
        ),
    ),
    Question(("Does it fit into memory?",), ()),
    Question(
        ("Do mini-batches disagree:", "report.next_rho near 0?"),
        ("larger mini-batches, or", "AdaptiveBatchSampler(len(data), optimizer)"),
    ),
    Question(
        ("Do refreshes take the time:", 'report.seconds["inverse"]?'),
        ("Intervals(inverse_interval=50), or", "Intervals(inverse_lag=5), beside the steps"),
    ),
    Question(
        ("Is a step worth more to you", "than its cost?"),
        ('inverse="block_tridiagonal"', 'or inverse="ekfac"'),
    ),
)
NEGATIVE = {
    0: (
        "convex in the outputs: kronfac.GaussNewton(loss);",
        "by hand: kronfac.observe, least_squares",
    ),
    2: ("closure(x, y, chunk=64);", "blocks=Blocks(wide_limit=1024)"),
}
"""Rows whose remedy is for the answer no."""


def flow_chart() -> str:
    """The whole chart."""
    parts = [_box("start", *QUESTION, 16, ("KFAC(model, loss_fn)",), code=True)]
    for index, row in enumerate(ROWS):
        top = 16 + (index + 1) * ROW
        remedy, answer, down = row.remedy, "yes", "no"
        if index in NEGATIVE:
            remedy, answer, down = NEGATIVE[index], "no", "yes"
        above = "" if index == 0 else ("yes" if index - 1 in NEGATIVE else "no")
        parts.append(_down(top - ROW + BOX, top, above))
        parts.append(_box("question", *QUESTION, top, row.asked))
        parts.append(_across(top + BOX / 2, answer))
        parts.append(_box("answer", *ANSWER, top, remedy))
    last = 16 + (len(ROWS) + 1) * ROW
    parts.append(_down(last - ROW + BOX, last, down))
    parts.append(_box("start", *QUESTION, last, ("leave it as it is",)))
    height = last + BOX + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" font-family="system-ui, sans-serif" font-size="15">\n'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _box(
    kind: str, left: float, width: float, top: float, lines: Sequence[str], code: bool = False
) -> str:
    fill, ink = COLOURS[kind]
    middle = top + BOX / 2 + 5 - 10 * (len(lines) - 1)
    family = ' font-family="ui-monospace, monospace"' if code else ""
    texts = "".join(
        f'<text x="{left + width / 2}" y="{middle + 20 * i}" text-anchor="middle" fill="{ink}"{family}>'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{BOX}" rx="8" fill="{fill}"/>{texts}'
    )


def _down(start: float, end: float, label: str) -> str:
    x = QUESTION[0] + QUESTION[1] / 2
    return (
        f'<path d="M{x} {start}V{end - 1}" stroke="{LINE}" stroke-width="2" marker-end="url(#tip)"/>'
        f'<text x="{x + 10}" y="{(start + end) / 2 + 5}" fill="{LINE}">{label}</text>'
    )


def _across(y: float, label: str) -> str:
    left, right = sum(QUESTION), ANSWER[0]
    return (
        f'<path d="M{left} {y}H{right - 1}" stroke="{LINE}" stroke-width="2" marker-end="url(#tip)"/>'
        f'<text x="{(left + right) / 2}" y="{y - 8}" text-anchor="middle" fill="{LINE}">{label}</text>'
    )

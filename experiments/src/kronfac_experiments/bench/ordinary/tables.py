"""The comparison in tables: losses, validation errors, AdamW's learning rates, the problems."""

import math
from collections.abc import Sequence

from kronfac_experiments.bench.ordinary.config import LEARNING_RATES, TUNING_SEED
from kronfac_experiments.bench.ordinary.problems import PROBLEMS
from kronfac_experiments.bench.ordinary.run import SLICE
from kronfac_experiments.bench.ordinary.score import FLOOR, Line, Side, summary
from kronfac_experiments.bench.ordinary.trials import ADAMW_NAME, Trials, best_rate
from kronfac_experiments.pages.document import Table

METHOD = (
    "K-FAC is KFAC(model, loss), all else at its default. AdamW has PyTorch's defaults but for the "
    "learning rate, chosen by the training loss after as many seconds from another start, and for "
    "weight_decay 0, so that the training loss is what both minimise. Runs from one seed have the same "
    f"initial parameters and mini-batches and take turns of {SLICE:g} s. Only steps are on the clock: no "
    "drawing of mini-batches, no evaluating."
)


def tables(lines: Sequence[Line], trials: Trials) -> list[Table]:
    """All of them."""
    several = lines[0].kfac.runs > 1
    return [
        _losses(lines),
        *([_spread(lines)] if several else []),
        _validation(lines),
        _tuning(lines, trials),
        _problems(lines),
    ]


def _losses(lines: Sequence[Line]) -> Table:
    rows = []
    for line in lines:
        edge = " !" if line.lr in (LEARNING_RATES[0], LEARNING_RATES[-1]) else ""
        ratio = f"{line.ratio:.3g}" if 0 < line.ratio < math.inf else "–"
        losses = (_loss(line.kfac.loss), _loss(line.adamw.loss))
        rest = (line.verdict, ratio, f"{line.lr:g}{edge}", _trouble(line.kfac))
        rows.append((line.problem, *losses, *rest))
    note = (
        f"{summary(lines)} Losses are over all training cases, medians of the seeds. Ratio: AdamW's over "
        f"K-FAC's, above 1 where K-FAC's is lower; two below {FLOOR:g} tie. lr: AdamW's, with ! where it "
        "is the first or last of those tried. Diverged: ended above the loss at the start, or not finite "
        f"(∞); rose: was above it on the way. {METHOD}"
    )
    columns = ("problem", "K-FAC", "AdamW", "lower", "ratio", "lr", "K-FAC runs")
    return Table("Training loss at the end", columns, rows, note)


def _spread(lines: Sequence[Line]) -> Table:
    rows = [
        (
            line.problem,
            *(_loss(loss) for s in (line.kfac, line.adamw) for loss in (s.least, s.most)),
        )
        for line in lines
    ]
    columns = ("problem", "K-FAC, least", "most", "AdamW, least", "most")
    return Table("Training loss at the end, least and most of the seeds", columns, rows)


def _validation(lines: Sequence[Line]) -> Table:
    rows = []
    for line in lines:
        unit = "" if PROBLEMS[line.problem].error_name == "mean squared error" else " %"
        kfac, adamw = (
            (_error(side.error, unit), _error(side.best_error, unit), f"{side.steps:,.0f}")
            for side in (line.kfac, line.adamw)
        )
        rows.append((line.problem, *kfac, *adamw))
    note = (
        "In % of the held-out cases misclassified, or as mean squared error of standardised targets; at "
        "best: at the evaluation where it was lowest. Steps: of training, in the seconds of a run. All are "
        "medians of the seeds."
    )
    columns = ("problem", "K-FAC", "at best", "steps", "AdamW", "at best", "steps")
    return Table("Validation error at the end", columns, rows, note)


def _tuning(lines: Sequence[Line], trials: Trials) -> Table:
    rows = []
    for line in lines:
        best = best_rate(line.problem, trials)
        ends = {lr: trials[line.problem, ADAMW_NAME, lr, TUNING_SEED].end for lr in LEARNING_RATES}
        cells = (f"{_loss(end)}{'*' if lr == best else ''}" for lr, end in ends.items())
        rows.append((line.problem, *cells))
    note = f"Training loss at the end from seed {TUNING_SEED}; * is the learning rate taken."
    columns = ("problem", *(f"{lr:g}" for lr in LEARNING_RATES))
    return Table("AdamW's learning rates", columns, rows, note, detail=True)


def _problems(lines: Sequence[Line]) -> Table:
    rows = []
    for problem in (PROBLEMS[line.problem] for line in lines):
        widths = "-".join(map(str, problem.layers))
        network = f"{widths}, {problem.activation.__name__}"
        batch = str(problem.batch) if problem.batch else "all"
        cases = f"{len(problem.split.train):,}"
        rows.append((problem.name, problem.about, network, problem.loss.__name__, batch, cases))
    note = (
        "Cases are those of training, half as many are held out. Inputs, and the targets of regressions, "
        "are standardised by the training cases. PyTorch's initial parameters; epochs of shuffled "
        "mini-batches, the last, smaller one kept."
    )
    columns = ("problem", "data", "network", "loss", "batch", "cases")
    return Table("The problems", columns, rows, note, detail=True)


def _loss(loss: float) -> str:
    return "∞" if math.isinf(loss) else f"{loss:.3g}"


def _error(error: float, unit: str) -> str:
    return "∞" if math.isinf(error) else f"{error:.3g}{unit}"


def _trouble(side: Side) -> str:
    kinds = {"diverged": side.diverged, "rose": side.rose}
    return ", ".join(f"{count}/{side.runs} {kind}" for kind, count in kinds.items() if count)

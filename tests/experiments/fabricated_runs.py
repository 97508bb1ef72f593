"""Run folders as `kronfac train` writes them, made up."""

import json
import math
from pathlib import Path
from typing import Any

KFAC_PARTS = {"gradient": 0.04, "statistics": 0.02, "inverse": 0.03, "fisher_products": 0.01}
FIRST_ORDER_PARTS = {"gradient": 0.02, "update": 0.005}


def metrics(iterations: int = 60, kfac: bool = True, scale: float = 1.0) -> list[dict[str, Any]]:
    """A row an iteration; errors, in iteration 0 and every tenth, fall from about 201·scale to `scale`."""
    parts = KFAC_PARTS if kfac else FIRST_ORDER_PARTS
    rows: list[dict[str, Any]] = []
    for i in range(iterations + 1):
        error = scale * (1 + 200 * math.exp(-i / 10))
        row = {
            "iteration": i,
            "cases": 500 * i,
            "seconds": i * sum(parts.values()),
            "batch": 500 if i else 0,
            "loss": 4 * error if i else None,
            "lambda": 150 * 0.95**i if kfac else None,
            "gamma": 12 * 0.9 ** (i // 20) if kfac else None,
            "rho": 1 + 0.5 * math.sin(i) if kfac and i % 5 == 0 and i else None,
            "alpha": 0.1 + 1 / (1 + i) if kfac and i else None,
            "mu": 0.9 - 1 / (2 + i) if kfac and i > 1 else None,
        }
        if i:
            row["parts"] = parts
        if i % 10 == 0:
            row |= {"train_error": error, "test_error": 1.1 * error}
            if i >= 20:
                row["averaged_train_error"] = 0.9 * error
        rows.append(row)
    return rows


def config(problem: str = "mnist", **options: Any) -> dict[str, Any]:
    """The configuration of a K-FAC run, but for `options`."""
    usual = {"optimizer": "kfac", "batch": 500, "seed": 0, "dtype": "float32", "threads": 2}
    kfac = {"inverse": "block_diagonal", "preset": "paper"}
    return {
        "name": problem,
        "config": usual | {"problem": problem, "kfac": kfac} | options,
        "versions": {"kronfac": "0.1.0", "torch": "2.13.0"},
        "machine": {"processors": 2},
    }


def write_run(
    folder: Path,
    rows: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A whole run by default; returns the folder."""
    folder.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in (metrics() if rows is None else rows)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = config() if settings is None else settings
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

"""Reconstructions over training, as rows of pictures inside the page."""

import base64
import struct
import zlib
from html import escape

import numpy as np
from numpy.typing import NDArray

from kronfac_experiments.report.runs import Run
from kronfac_experiments.report.tables import number, whole

CASES = 8
ROWS = 7
GAP = 2
"""Transparent pixels between two cases."""


def gallery(run: Run) -> str:
    """The originals, below them a row of reconstructions for each of a few iterations. HTML."""
    shots = run.snapshots
    if shots is None:
        return ""
    cases = min(CASES, len(shots.originals))
    low, high = grey_range(shots.originals[:cases])
    rows = [_row("originals", "", shots.originals[:cases], low, high, f"{cases} test cases")]
    for shot in spread(len(shots.iterations), ROWS - 1):
        iteration = int(shots.iterations[shot])
        rows.append(
            _row(
                f"iteration {whole(iteration)}",
                _error_at(run, iteration),
                shots.reconstructions[shot, :cases],
                low,
                high,
                f"Their reconstructions by {run.name} after {iteration} iterations",
            )
        )
    return f'<section class="gallery"><h3>{escape(run.name)}</h3>{"".join(rows)}</section>'


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices: the first, the last, and denser towards the first.

    Training changes pictures by factors of time, not by steps of it.
    """
    if count <= most:
        return list(range(count))
    steps = np.rint(np.geomspace(1, count, most)).astype(int) - 1
    for place in range(1, most):  # rounding may have made neighbours equal
        steps[place] = max(steps[place], steps[place - 1] + 1)
    return [int(step) for step in steps]


def grey_range(originals: NDArray[np.float64]) -> tuple[float, float]:
    """The values that are black and white: 0 and 1 for pixels in between, else what occurs."""
    finite = originals[np.isfinite(originals)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high if high > low else low + 1.0


def strip(images: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Images (n, side, side) beside each other: (side, n·(side+gap) − gap, 2), grey and opacity."""
    grey = np.nan_to_num((images - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0)
    count, side, _ = grey.shape
    pixels = np.zeros((side, count, side + GAP, 2), dtype=np.uint8)
    pixels[:, :, :side, 0] = np.rint(255 * grey.clip(0, 1)).swapaxes(0, 1)
    pixels[:, :, :side, 1] = 255
    return pixels.reshape(side, -1, 2)[:, :-GAP]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of (height, width, 2) bytes, grey and opacity (ISO/IEC 15948)."""
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: the line is not filtered
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _row(
    label: str, below: str, images: NDArray[np.float64], low: float, high: float, alt: str
) -> str:
    pixels = strip(images, low, high)
    height, width, _ = pixels.shape
    source = base64.b64encode(png(pixels)).decode("ascii")
    return (
        f'<div class="shot"><p>{escape(label)}<small>{escape(below)}</small></p>'
        f'<img alt="{escape(alt)}" width="{2 * width}" height="{2 * height}" '
        f'src="data:image/png;base64,{source}"></div>'
    )


def _error_at(run: Run, iteration: int) -> str:
    at = np.flatnonzero(run.columns["iteration"] == iteration)
    for name, label in (("test_error", "test error"), ("train_error", "training error")):
        if len(at) and np.isfinite(run.columns[name][at[0]]):
            return f"{label} {number(float(run.columns[name][at[0]]))}"
    return ""

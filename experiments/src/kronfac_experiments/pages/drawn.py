"""What the pictures that matplotlib draws have in common."""

from dataclasses import dataclass
from io import BytesIO
from typing import Literal

from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by all kinds of colour vision.
BLUE, VERMILION, GREEN, BLACK, SKY = "#0072B2", "#D55E00", "#009E73", "#000000", "#56B4E9"

DPI = 160


@dataclass(frozen=True)
class Style:
    """Colour, dashes and marker: each alone tells the lines apart."""

    colour: str
    line: Literal["-", "--", "-.", ":"]
    marker: str


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as the content of a PNG file."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()

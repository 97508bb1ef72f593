"""What tells runs apart: a colour and a marker each, so that neither is needed alone.

The colours are those of Okabe and Ito (2008), which remain distinct for the colour-blind; their values
for a light and a dark page are in `page.css`. The line's dashes say which error it is.
"""

from dataclasses import dataclass

COLOURS = 7

# plotly's name of the marker, and the same shape within (−4, 4)².
MARKERS = {
    "circle": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0z",
    "square": "M-3,-3h6v6h-6z",
    "diamond": "M0,-4.2l4.2,4.2l-4.2,4.2l-4.2,-4.2z",
    "triangle-up": "M0,-4l4,6.8h-8z",
    "triangle-down": "M0,4l4,-6.8h-8z",
    "cross": "M-1.4,-4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "hourglass": "M-3.6,-3.6h7.2l-7.2,7.2h7.2z",
    "bowtie": "M-3.6,-3.6v7.2l7.2,-7.2v7.2z",
}


@dataclass(frozen=True)
class RunStyle:
    """How one run is drawn everywhere on the page."""

    colour: str
    """A custom property of `page.css`."""
    symbol: str

    @property
    def swatch(self) -> str:
        """A piece of the run's line with its marker. HTML."""
        return (
            f'<svg class="swatch" style="color:var({self.colour})" viewBox="-14 -6 28 12" '
            'aria-hidden="true"><path d="M-13,0h26" stroke="currentColor" stroke-width="2"/>'
            f'<path d="{MARKERS[self.symbol]}" fill="currentColor"/></svg>'
        )


def run_styles(count: int) -> list[RunStyle]:
    """A style for each run: 56 that differ, since 7 and 8 have no common divisor."""
    symbols = list(MARKERS)
    return [
        RunStyle(f"--colour-{index % COLOURS}", symbols[index % len(symbols)])
        for index in range(count)
    ]

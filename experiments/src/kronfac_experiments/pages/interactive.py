"""The scripts of a page with plots that answer: plotly.js, the data, and what draws them."""

import json
import platform
import re
from importlib.metadata import version

from plotly.offline import get_plotlyjs

from kronfac_experiments.pages.page import Scripts, packaged


def interactive(data: object) -> Scripts:
    """Draw these series, as `report.series.plot_data` makes them."""
    plotly = get_plotlyjs()
    return Scripts(
        html=(
            f'<script type="application/json" id="plot-data">{_script_json(data)}</script>\n'
            f"<script>{plotly}</script>\n<script>\n{packaged('page.js')}\n</script>"
        ),
        versions=_versions(plotly),
    )


def _versions(plotly: str) -> str:
    found = re.search(r"plotly\.js v([\d.]+)", plotly[:500])
    drawn = f"plotly.js {found[1]}" if found else "plotly.js"
    return f"kronfac {version('kronfac')}, {drawn}, Python {platform.python_version()}"


def _script_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")

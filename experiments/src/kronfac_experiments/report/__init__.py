"""`kronfac report RUN…`: what runs did, as one HTML page that needs no network.

A run is a folder that `kronfac train` wrote; `runs.py` reads it. The page is put together in `page.py`
from tables, pictures and the numbers of the plots, which `page.js` draws with plotly.js.
"""

from kronfac_experiments.report.page import ReportConfig, write_report
from kronfac_experiments.report.runs import ReportError

__all__ = ["ReportConfig", "ReportError", "write_report"]

"""`kronfac report RUN…`: what runs did, as one HTML page that needs no network.

A run is a folder that `kronfac train` wrote; `runs.py` reads it. The page is put together in `page.py`
from the tables of `tables.py` and the plots of `figures.py`.
"""

from kronfac_experiments.report.page import ReportConfig, write_report
from kronfac_experiments.report.runs import ReportError

__all__ = ["ReportConfig", "ReportError", "write_report"]

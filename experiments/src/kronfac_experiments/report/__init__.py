"""`kronfac report`: `runs.py` reads run folders, `page.py` puts the page together, `figures.py` draws."""

from kronfac_experiments.report.page import ReportConfig, write_report
from kronfac_experiments.report.runs import ReportError

__all__ = ["ReportConfig", "ReportError", "write_report"]

"""Optimizers race on problems: equal seconds or steps, equal tuning, every run kept in a JSONL file.

`problems.py` is the table of problems, `contestants.py` that of contestants with their grids. `plan.py`
decides which runs are missing, `run.py` makes one, `records.py` keeps it, `pages.py` shows it.
"""

"""The experiments of [MG15]: problems and data, and what runs and reports them.

Needs `pip install kronfac[experiments]`; nothing outside this package imports it.
"""

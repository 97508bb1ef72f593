"""The experiments of [MG15]: problems and data, and what runs and reports them.

A distribution of its own, `kronfac-experiments`: the library, `kronfac`, imports nothing from here.
"""

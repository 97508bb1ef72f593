"""The race on networks: training loss and validation metric in equal seconds, seed by seed.

`problems.py` and `models.py` say on what, `racers.py` who; `run.py` is one run, `network_race.py` the runs
of a problem, `running.py` all of them; `scores.py` compares, `tables.py` and `picture.py` show it.
"""

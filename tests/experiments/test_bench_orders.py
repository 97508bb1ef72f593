"""`kronfac bench orders` runs every order and writes medians and quartiles."""

import json
from statistics import median

from tests.experiments.runs import kronfac
from tests.trajectories.runs import run


def test_bench_orders(tmp_path):
    page = tmp_path / "orders.md"
    arguments = ("--orders", "2", "--steps", "3", "--output", str(page))
    kronfac("bench", "orders", *arguments, "--run-dir", str(tmp_path / "runs"))
    text = page.read_text()
    assert "kronfac bench orders" in text
    assert "float64" in text
    trials = json.loads((tmp_path / "runs" / "orders.json").read_text())["trials"]
    assert len(trials) == 4
    recorded = run("cancer", "block_diagonal", "default")["losses"]
    first = trials[0]
    assert first["name"] == "block_diagonal, random examples"
    assert first["losses"][0] == recorded[2]  # the first order is that of the recorded run
    assert f"| {first['name']} | {median(first['losses']):.2g} |" in text

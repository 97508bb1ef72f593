"""`kronfac bench world`: plans over growing numbers of processes, with measured runs beside them."""

import json

import pytest

from kronfac_experiments.bench.world import WorldConfig, world_command
from kronfac_experiments.bench.world.model import decoder

SMALL = {
    "width": 16,
    "depth": 1,
    "heads": 2,
    "hidden": 24,
    "vocabulary": 40,
    "tokens": 6,
    "sequences": 64,
    "processes": (4, 1, 128),
}
RUN = {
    "name": "a small one",
    "processes": 2,
    "seconds": 0.5,
    "bytes": 2e6,
    "memory": 3e6,
    "planned_seconds": 0.25,
    "planned_bytes": 1e6,
    "planned_memory": 4e6,
}


def test_the_page_has_every_setting_and_what_breaks(tmp_path):
    output = tmp_path / "world.md"
    written = world_command(WorldConfig(**SMALL, run_dir=tmp_path, output=output))
    assert all(path.exists() for path in written)
    page = output.read_text()
    assert "## What breaks" in page
    assert "examples: there are fewer than processes, 64 of the mini-batch" in page
    assert "Not measured yet" in page
    numbers = json.loads((tmp_path / "world.json").read_text())
    assert len(numbers) == 4
    for own in numbers.values():
        assert [plan["world"]["processes"] for plan in own] == [1, 4, 128]


def test_measured_runs_stand_beside_their_plans(tmp_path):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps([RUN]))
    output = tmp_path / "world.md"
    world_command(WorldConfig(**SMALL, measured=measured, run_dir=tmp_path, output=output))
    assert (
        "| a small one | 2 | 0.5 / 0.25 | 2.0 MB / 1.0 MB | 3.0 MB / 4.0 MB |" in output.read_text()
    )


def test_the_usual_model_has_seven_billion_parameters():
    usual = WorldConfig()
    model, _ = decoder(
        usual.width, usual.depth, usual.heads, usual.hidden, usual.vocabulary, 1, usual.tokens
    )
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(6.74e9, rel=0.01)

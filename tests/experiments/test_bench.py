"""`kronfac bench`: tiny real runs, their tables, and answers to mistakes."""

import pytest
from rich.console import Console

from kronfac_experiments.bench import import_time, mnist, ranks, steps
from kronfac_experiments.options import command_line
from tests.experiments.runs import kronfac, tiny_problems

STEP = (
    "step --problem curves --threads 1 --batches 20 --repeats 2 --steps 2 --inverses block_diagonal"
)


def bench(*words):
    return kronfac("bench", *words)


def test_a_step_is_measured_by_part(tmp_path):
    page = tmp_path / "step.md"
    assert bench(*STEP.split(), "--output", page) == 0
    text = page.read_text()
    assert "Made by `kronfac bench step --threads 1 --problem curves" in text
    assert "float32, 1 thread, seed 0, torch" in text
    assert "| block-diagonal, m = 20 |" in text
    for part in ("gradient", "statistics", "direction", "fisher products"):
        assert f"| {part} |" in text


def test_small_networks_are_measured(tmp_path):
    page = tmp_path / "page.md"
    assert bench("small-step", "--repeats", 1, "--steps", 2, "--output", page) == 0
    text = page.read_text()
    assert "K-FAC / AdamW, 10-50-50-50-1" in text
    assert "K-FAC with dropout / without" in text


def test_a_network_of_the_race_is_measured(tmp_path):
    page = tmp_path / "page.md"
    words = ("--networks", "tabular", "--repeats", 1, "--steps", 2, "--warm-up", 1)
    assert bench("network-step", *words, "--output", page) == 0
    assert "| tabular, m = 1024 |" in page.read_text()


def test_steps_are_taken_in_turn_and_repeats_are_their_means():
    class Steps:
        def __init__(self, seconds):
            self.seconds = seconds

        def step(self, x, y):
            now[0] += self.seconds

    now = [0.0]
    batches = iter([(0, 0)] * 100)
    pair = Steps(3.0), Steps(2.0)
    found = steps.interleaved("name", pair, batches, (1, 2, 5), lambda: now[0])
    assert found.ratios == [1.5, 1.5]
    assert (found.first, found.second, found.start) == ([3.0, 3.0], [2.0, 2.0], 3.0)


def test_the_import_is_measured_in_processes_of_its_own(tmp_path):
    page = tmp_path / "page.md"
    assert bench("import", "--repeats", 1, "--output", page) == 0
    assert "what kronfac adds to it" in page.read_text()
    alone, statement, both = import_time.measure(import_time.ImportConfig(repeats=1))
    assert 0 < statement[0] < both[0]
    assert alone[0] > 0


def test_examples_to_an_error_are_compared_with_the_threshold(tmp_path, monkeypatch, capsys):
    tiny_problems(monkeypatch, "mnist")
    monkeypatch.setattr(mnist, "MOST_ITERATIONS", 20)
    monkeypatch.setattr(mnist, "ERROR", 2.0)
    words = ("mnist", "--seeds", 0, 1, 2, "--runs", tmp_path, "--threads", 1)
    assert bench(*words) == 0
    out = capsys.readouterr().out
    assert "Examples to error 2.0" in out
    assert "At most 100,000 are allowed" in out
    monkeypatch.setattr(mnist, "MOST_EXAMPLES", 1)
    assert bench(*words) == 1
    assert "is above the threshold of 1." in capsys.readouterr().err


@pytest.mark.slow
def test_mnist_by_defaults_takes_at_most_100_000_examples(real_data, tmp_path):
    """Median of six seeds; about 500,000 in the authors' run."""
    assert bench("mnist", "--runs", tmp_path) == 0


@pytest.mark.slow
def test_two_processes_send_gradients_statistics_and_inverses(tmp_path, monkeypatch):
    config = ranks.RanksConfig(
        processes=(1, 2),
        widths=(200, 100, 10),
        batch=64,
        warm_up=3,
        steps=4,
        repeats=1,
        output=tmp_path / "page.md",
    )
    found = ranks.measure(config, Console(quiet=True))
    sizes = {size: len(runs) for size, runs in found.items()}
    assert sizes == {1: 1, 2: 2}
    parameters = 201 * 100 + 101 * 10
    statistics = sum(n * (n + 1) / 2 for n in (201, 100, 101, 10))
    # Gradient and statistics in every step; inverses as large as the statistics in a part of them.
    least = 4 * (parameters + statistics)
    (sent,) = found[2][0].travelled
    assert least < sent / 2 < 4 * least
    for run in found[2]:
        assert run.messages[0] > run.sums[0] >= 2
    assert found[1][0].messages == [0]
    monkeypatch.setattr(ranks, "measure", lambda config, console: found)
    ranks.ranks_command(config)
    assert "\n| 2 |" in (tmp_path / "page.md").read_text()


def test_the_command_says_what_is_not_default():
    config = steps.StepConfig(seed=3, batches=(10, 20), output=None)
    assert command_line("bench step", config) == "kronfac bench step --seed 3 --batches 10 20"


MISTAKES = {
    "authors-run --fractions 2": "--fractions are in (0, 1]",
    "authors-run --iterations 0": "--iterations is 1 or more; got 0",
    "ranks --processes 0": "--processes is 1 or more; got 0",
    "step --batches 0": "--batches is 1 or more; got 0",
    "step --batches 20001 --problem curves": "at most the 20,000 cases of curves; got 20001",
    "step --repeats 0": "--repeats is 1 or more",
    "step --threads 0": "--threads is 1 or more",
    "step --seed -1": "--seed is 0 or more",
    "step --preset papers": "invalid choice 'papers'",
    "step --inverses diagonal": "diagonal",
    "small-step --clock cpu --threads 2": "--clock cpu sees one thread; got --threads 2",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(words, capsys):
    assert bench(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[words] in line

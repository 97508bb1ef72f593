import os
import re
import subprocess
import sys

import numpy as np
import pytest

from kronfac import __version__
from kronfac_experiments.cli import COMMANDS, Command, Group
from kronfac_experiments.data.mnist import TRAIN_IMAGES
from tests.experiments.runs import kronfac, train, write_cases


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    """Neither data nor network."""
    monkeypatch.setenv("KRONFAC_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # refuses at once
    return tmp_path


def only_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    assert "Traceback" not in line
    return line


def every_command(commands: dict[str, Command | Group], above: str = "") -> list[str]:
    """The words that call each, those of groups included."""
    words = []
    for name, command in commands.items():
        words.append(above + name)
        if isinstance(command, Group):
            words += every_command(command.commands, f"{above}{name} ")
    return words


def test_the_console_script_lists_the_commands():
    script = os.path.join(os.path.dirname(sys.executable), "kronfac")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    for name, command in COMMANDS.items():
        assert name in done.stdout
        assert command.summary in done.stdout


@pytest.mark.parametrize("command", every_command(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    assert kronfac(*command.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"usage: kronfac {command}" in out
    options = re.findall(r"^│ (--[\w-]+)", out, flags=re.MULTILINE)
    assert out.count("default") + out.count("required") >= len(options)


def test_no_help_text_shows_a_none(capsys):
    assert kronfac("train", "--help") == 0
    assert "None" not in capsys.readouterr().out


def test_version(capsys):
    assert kronfac("--version") == 0
    assert capsys.readouterr().out == f"kronfac {__version__}\n"


def test_without_a_command_the_help_is_shown_as_a_mistake(capsys):
    assert kronfac() == 2
    assert "usage: kronfac COMMAND" in capsys.readouterr().err


def test_a_group_lists_its_commands(capsys):
    group = COMMANDS["bench"]
    assert kronfac("bench", "--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and c.summary in out for name, c in group.commands.items())
    assert kronfac("bench") == 2
    assert "usage: kronfac bench COMMAND" in capsys.readouterr().err


def test_only_the_command_that_is_called_is_imported():
    code = (
        "import sys; from kronfac_experiments.cli import main; main(['bench', '--help']); "
        "print([name for name in sys.modules if 'kronfac_experiments.bench' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


MISTAKES = {
    "bench stpe": "kronfac bench: no command 'stpe'; there are step",
    "trian": "no command 'trian'; there are train,",
    "train": "Name one PROBLEM (curves, mnist, faces, mnist16)",
    "train mnits": "PROBLEM is one of curves, mnist, faces, mnist16",
    "train curves mnist": "mnist",
    "train curves --data x.npz --layers 3,2": "Name one PROBLEM",
    "train --data x.npz": "--data needs --layers",
    "train --data x.npz --layers 3": "--layers is two or more positive widths",
    "train --data x.npz --layers 3,x": "--layers is two or more positive widths",
    "train --data absent.npz --layers 3,2": "There is no file absent.npz",
    "train curves --layers 3,2": "--layers goes with --data",
    "train curves --iterations many": "--iterations is INT; got 'many'",
    "train curves --iterations 0": "--iterations is 1 or more; got 0",
    "train curves --iterations": "--iterations",
    "train curves --seconds -1": "--seconds is finite, 0 or more",
    "train curves --until-error nan": "--until-error is finite",
    "train curves --seed 1.5": "--seed",
    "train curves --seed -1": "--seed is 0 or more",
    "train curves --threads 0": "--threads is 1 or more",
    "train curves --batch 0": "--batch is 1 or more",
    "train curves --batch papr": "--batch is INT",
    "train curves --average -1": "--average is 0 or more",
    "train curves --dtype float16": "float16",
    "train curves --device cuda:99": "--device cuda:99 can't be used here",
    "train curves --device gpu": "--device gpu can't be used here",
    "train curves --inverse diagonal": "invalid choice 'diagonal'",
    "train curves --preset papers": "invalid choice 'papers'",
    "train curves --optimizer adan": "--optimizer is kfac, nag or one of",
    "train curves --lr 0.1": "--lr: not for kfac",
    "train curves --optimizer nag --lambda0 3 --preset paper": "--preset, --lambda0: for kfac only",
    "train curves --optimizer adam --mu-max 0.9": "--mu-max is for nag alone",
    "train curves --wieght-decay 0.1": "--wieght-decay",
    "train --resume absent": "There is no run directory absent",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(words, no_data, monkeypatch, capsys):
    monkeypatch.chdir(no_data)
    assert kronfac(*words.split()) == 2
    assert MISTAKES[words] in only_line(capsys)
    assert not (no_data / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--lambda0 -1",
        "--fisher-fraction 2",
        "--statistics-fraction 0",
        "--weight-decay -1",
        "--batch 500",
        "--optimizer nag --lr -1",
        "--optimizer nag --mu-max 1",
        "--optimizer adam --lr -1",
        "--optimizer adam --lr nan",
    ],
)
def test_settings_that_the_optimizer_refuses(words, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(write_cases(tmp_path), run, *words.split()) == 2
    line = only_line(capsys)
    assert "got" in line or "Invalid" in line  # torch.optim's own words
    assert not run.exists()


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train(write_cases(tmp_path), tmp_path / "run") == 2
    assert "docs/howto/several_processes.md" in only_line(capsys)


def test_a_run_is_never_overwritten(tmp_path, capsys):
    data, run = write_cases(tmp_path), tmp_path / "run"
    assert train(data, run, "--iterations", 2) == 0
    before = (run / "metrics.jsonl").read_bytes()
    assert train(data, run, "--iterations", 2) == 2
    line = only_line(capsys)
    assert f"--resume {run}" in line
    assert "--run-dir" in line
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_traceback_for_those_who_ask(monkeypatch):
    monkeypatch.setenv("KRONFAC_DEBUG", "1")
    with pytest.raises(Exception, match="There is no run directory absent"):
        kronfac("train", "--resume", "absent")


def test_a_bug_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr("kronfac_experiments.race.pages.results_command", lambda config: [].missing)
    assert kronfac("results", "everyday") == 1
    assert "unexpected AttributeError" in only_line(capsys)


# --- data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["mnist", "faces", "mnist16"])
def test_missing_data_says_what_to_put_where(problem, no_data, monkeypatch, capsys):
    monkeypatch.chdir(no_data)
    assert kronfac("train", problem, "--iterations", 1) == 2
    line = only_line(capsys)
    assert "KRONFAC_DATA" in line
    assert "SHA-256" in line
    assert not (no_data / "runs").exists()


def test_damaged_data_is_refused(no_data, monkeypatch, capsys):
    monkeypatch.chdir(no_data)
    file = no_data / "named" / TRAIN_IMAGES.path
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not it")
    assert kronfac("train", "mnist", "--iterations", 1) == 2
    assert f"{file} is damaged" in only_line(capsys)


OWN = {
    "an image stack": ({"cases": np.ones((4, 4, 4))}, "has shape (4, 4, 4)"),
    "nothing in it": ({"cases": np.ones((0, 16))}, "has shape (0, 16)"),
    "text": ({"cases": np.full((4, 16), "a")}, "not of real numbers"),
    "complex numbers": ({"cases": np.ones((4, 16), complex)}, "not of real numbers"),
    "objects": ({"cases": np.full((4, 16), None)}, "is no .npz file of numbers"),
    "not finite": ({"cases": np.full((4, 16), np.nan)}, "not finite"),
    "one case": ({"cases": np.ones((1, 16))}, "holds one case"),
    "another width": ({"cases": np.ones((4, 15))}, "15 numbers each, and --layers has 16"),
    "another test width": (
        {"cases": np.ones((4, 16)), "test": np.ones((4, 3))},
        "16 numbers each, and the array 'test' has 3",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_own_data_is_checked(case, tmp_path, capsys):
    arrays, message = OWN[case]
    assert train(write_cases(tmp_path, **arrays), tmp_path / "run", "--batch", 2) == 2
    assert message in only_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_own_data_that_is_no_archive(content, tmp_path, capsys):
    path = tmp_path / "cases.npz"
    path.write_bytes(content)
    assert train(path, tmp_path / "run") == 2
    assert "is no .npz file of numbers, or is damaged" in only_line(capsys)


def test_own_data_that_was_cut(tmp_path, capsys):
    path = write_cases(tmp_path)
    path.write_bytes(path.read_bytes()[:-3000])
    assert train(path, tmp_path / "run") == 2
    assert "damaged" in only_line(capsys)

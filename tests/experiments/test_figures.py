"""The figures of one network, with tiny settings and random data; the others: test_figure_runs.py."""

import contextlib
import csv
import io
from pathlib import Path

import pytest
import torch

from kronfac import KFAC
from kronfac_experiments import problems
from kronfac_experiments.data.mnist import LabelledImages, Mnist
from kronfac_experiments.figures import FIGURES, FigureConfig, figure_7, files, make_figure, network

TINY = figure_7.Setting("curves", 6, 10, 10.0, 0.01, 10.0, 4)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Random images for the classifier, a tiny autoencoder, and few pixels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (80,), generator=generator)
    images = torch.rand(80, 256, generator=generator) * (1 + labels[:, None]) / 10
    part = LabelledImages(images, labels)
    tiny = problems.Problem("curves", (12, 6, 3, 6, 12), "bernoulli", 1e-5, 40, 10)
    data = torch.rand(40, 12, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "mnist_16x16", lambda: Mnist(part, part))
        patch.setitem(problems.PROBLEMS, "curves", tiny)
        patch.setattr(problems, "load", lambda name: (data, data[:10]))
        patch.setattr(figure_7, "QUICK", TINY)
        patch.setattr(figure_7, "FULL", TINY)
        patch.setattr(files, "DPI", 30)
        yield


class Made:
    """Figures, made once for all tests: the paths, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[int, tuple[list[Path], str]] = {}

    def __call__(self, number: int) -> tuple[list[Path], str]:
        if number not in self._made:
            cases = None if number == 7 else 60
            config = FigureConfig(
                number,
                quick=True,
                output=self.folder,
                runs=self.folder.parent,
                cases=cases,
                threads=1,
            )
            with contextlib.redirect_stdout(io.StringIO()) as said:
                paths = make_figure(config)
            self._made[number] = paths, said.getvalue()
        return self._made[number]

    def rows(self, number: int) -> list[dict[str, str]]:
        return read(self(number)[0][-1])

    def values(self, number: int) -> dict[str, float]:
        return {row["quantity"]: float(row["value"]) for row in self.rows(number)}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made") / "new" / "folder")


@pytest.mark.parametrize("number", [2, 3, 5, 6, 7])
def test_writes_png_pdf_and_csv_and_says_so(number, made):
    paths, said = made(number)
    assert paths == [made.folder / f"figure_{number}.{end}" for end in ("png", "pdf", "csv")]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert made.rows(number)
    assert f"Figure {number}" in said
    assert said.rstrip().endswith("\n".join(f"wrote {path}" for path in paths))


def test_figure_2_has_the_papers_numbers_beside_its_own(made):
    rows = {row["quantity"]: row for row in made.rows(2)}
    error = rows["total approximation error, Σ |F − F̃|"]
    bound = rows["its bound by cumulants"]
    assert (error["paper"], bound["paper"]) == ("2894.4", "4134.6")
    assert 0 < float(error["value"]) < float(bound["value"])
    blocks = [v for name, v in made.values(2).items() if name.startswith("Σ |F − F̃| of the block")]
    assert len(blocks) == 16
    assert sum(blocks) == pytest.approx(float(error["value"]))


def test_figure_3_has_the_averages_of_all_blocks(made):
    averages = [name for name in made.values(3) if name.startswith("average of |F̃⁻¹|")]
    assert len(averages) == 16


def test_figures_5_and_6_say_which_approximation_is_closer(made):
    for number, power in ((5, ""), (6, "⁻¹")):
        values = made.values(number)
        diagonal, tridiagonal = (
            values[f"‖F̃{power} − {other}{power}‖ / ‖F̃{power}‖, Frobenius"] for other in ("F̆", "F̂")
        )
        assert tridiagonal < diagonal


def test_figure_5_without_damping_where_that_is_defined(made, tmp_path):
    assert any("without damping" in name for name in made.values(5))
    few = make_figure(FigureConfig(number=5, output=tmp_path, cases=5, threads=1))[-1]
    assert not any("without damping" in row["quantity"] for row in read(few))


def test_figure_7_has_every_gamma_for_every_rule(made):
    rows = made.rows(7)
    assert len(rows) == 3 * 4
    assert {row["rule"] for row in rows} == set(figure_7.STYLES)
    gammas = sorted({float(row["gamma"]) for row in rows})
    assert gammas == pytest.approx([0.01, 0.1, 1.0, 10.0])


def test_figure_7_trains_once_and_sweeps_from_there(tmp_path, monkeypatch):
    step, taken = KFAC.step, []
    monkeypatch.setattr(KFAC, "step", lambda self, closure: taken.append(1) or step(self, closure))
    config = FigureConfig(number=7, output=tmp_path, runs=tmp_path, threads=1)
    whole = make_figure(config)[-1].read_text()
    assert len(taken) == TINY.iterations
    assert make_figure(config)[-1].read_text() == whole
    assert len(taken) == TINY.iterations


def test_threads_are_put_back(made, monkeypatch):
    threads = torch.get_num_threads()
    seen = []
    monkeypatch.setitem(FIGURES, 2, lambda config: seen.append(torch.get_num_threads()) or [])
    make_figure(FigureConfig(number=2, threads=threads + 1))
    assert seen == [threads + 1]
    assert torch.get_num_threads() == threads


def test_a_wrong_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="are 2, 3, 5, 6, 7, 9, 10, 11; got 4"):
        make_figure(FigureConfig(number=4, output=tmp_path))
    with pytest.raises(ValueError, match="There are 80 training cases; got cases=81"):
        make_figure(FigureConfig(number=2, output=tmp_path, cases=81))
    with pytest.raises(ValueError, match="threads is 1 or more"):
        FigureConfig(number=2, threads=0)
    with pytest.raises(ValueError, match="cases is 2 or more"):
        FigureConfig(number=2, cases=0)
    assert not any(tmp_path.iterdir())

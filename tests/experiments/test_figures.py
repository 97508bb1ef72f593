"""The figures of one network, with tiny settings and random data; the others: test_figure_runs.py."""

import pytest
import torch

from kronfac import KFAC
from kronfac_experiments.data.mnist import LabelledImages, Mnist
from kronfac_experiments.figures import FIGURES, FigureConfig, figure_7, files, make_figure, network
from tests.experiments.figures import Made, figure, table
from tests.experiments.runs import tiny_problems

TINY = figure_7.Setting("curves", 6, 10, 10.0, 0.01, 10.0, 4)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Random images for the classifier, a tiny autoencoder, and few pixels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (80,), generator=generator)
    images = torch.rand(80, 256, generator=generator) * (1 + labels[:, None]) / 10
    part = LabelledImages(images, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "mnist_16x16", lambda: Mnist(part, part))
        tiny_problems(patch, "curves")
        patch.setattr(figure_7, "QUICK", TINY)
        patch.setattr(figure_7, "FULL", TINY)
        patch.setattr(files, "DPI", 30)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made") / "new" / "folder", cases=60)


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
    few = figure(5, tmp_path, quick=False, cases=5)[0][-1]
    assert not any("without damping" in row["quantity"] for row in table(few))


def test_figure_7_has_every_gamma_for_every_rule(made):
    rows = made.rows(7)
    assert len(rows) == 3 * 4
    assert {row["rule"] for row in rows} == set(figure_7.STYLES)
    gammas = sorted({float(row["gamma"]) for row in rows})
    assert gammas == pytest.approx([0.01, 0.1, 1.0, 10.0])


def test_figure_7_trains_once_and_sweeps_from_there(tmp_path, monkeypatch):
    step, taken = KFAC.step, []
    monkeypatch.setattr(KFAC, "step", lambda self, closure: taken.append(1) or step(self, closure))
    whole = figure(7, tmp_path, quick=False)[0][-1].read_text()
    assert len(taken) == TINY.iterations
    assert figure(7, tmp_path, quick=False)[0][-1].read_text() == whole
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

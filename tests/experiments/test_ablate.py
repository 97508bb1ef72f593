"""`kronfac ablate`: its rows are what they say, its table follows from its trials, nothing runs twice."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

import kronfac
from kronfac import BlockDiagonalInverse, ExactTikhonov, FactoredTikhonov
from kronfac.diagnostics import exact_fisher
from kronfac_experiments.ablation import rows
from kronfac_experiments.ablation import trials as running
from kronfac_experiments.ablation.rows import ROWS, WHOLE, NoInverse, PlainStep, Row, rows_named
from kronfac_experiments.ablation.table import lines_of
from kronfac_experiments.ablation.trials import Trial
from kronfac_experiments.config import FirstOrderOptions, KfacOptions, TrainConfig
from kronfac_experiments.optimizers import FirstOrderStepper
from tests.experiments.runs import kronfac as command
from tests.experiments.runs import rows as metrics
from tests.experiments.runs import train, write_cases


@pytest.fixture
def ablate(tmp_path):
    data = write_cases(tmp_path)

    def run(*words, folder=tmp_path / "ablation"):
        sizes = ("--iterations", 8, "--batch", 40, "--evaluation-cases", 100, "--threads", 1)
        options = ("--data", data, "--layers", "16,8,3", "--run-dir", folder, *sizes)
        return command("ablate", *options, *words)

    return run


def result(folder):
    return json.loads((folder / "ablate.json").read_text())


def test_every_row_runs_and_is_in_the_table(ablate, tmp_path, capsys):
    assert ablate("--seeds", 2) == 0
    folder = tmp_path / "ablation"
    with (folder / "ablate.csv").open() as file:
        lines = {line["row"]: line for line in csv.DictReader(file)}
    assert list(lines) == [row.name for row in ROWS]
    assert float(lines["K-FAC's momentum on the gradient"]["iterations"]) == 40
    text = (folder / "ablate.md").read_text()
    assert all(row.name in text for row in ROWS)
    assert "Made by `kronfac ablate --data" in text
    assert (folder / "ablate.html").read_text().count("<table") == 1
    assert (folder / "ablate.png").stat().st_size > 20_000
    out = capsys.readouterr().out
    assert all(
        f"Wrote {folder / name}" in out for name in ("ablate.json", "ablate.csv", "ablate.png")
    )


def test_the_whole_row_is_kfac_as_train_runs_it(ablate, tmp_path):
    assert ablate("--seeds", 1, "--rows", "no momentum") == 0
    ours = {trial["row"]: trial for trial in result(tmp_path / "ablation")["trials"]}
    options = ("--preset", "paper", "--lambda0", 1, "--iterations", 8, "--evaluation-cases", 100)
    for row, more in ((WHOLE, ()), ("no momentum", ("--no-momentum",))):
        run = tmp_path / f"run {len(more)}"
        assert train(write_cases(tmp_path), run, *options, *more) == 0
        assert metrics(run)[-1]["train_error"] == pytest.approx(ours[row]["errors"][-1], rel=1e-6)


def test_what_has_run_is_not_run_again(ablate, tmp_path, monkeypatch):
    folder = tmp_path / "ablation"
    assert ablate("--seeds", 1, "--rows", "tridiagonal") == 0
    first = result(folder)["trials"]
    ran = []
    whole = running._run
    monkeypatch.setattr(running, "_run", lambda *args: ran.append(args[2].name) or whole(*args))
    assert ablate("--seeds", 1, "--rows", "tridiagonal", "Frobenius") == 0
    assert ran == ["π by the Frobenius norm"]
    assert result(folder)["trials"][:2] == first
    assert ablate("--seeds", 2, "--rows", "Frobenius") == 0
    assert ran[1:] == [WHOLE, "π by the Frobenius norm"], "only the second seed"
    assert ablate("--seeds", 1, "--rows", "Frobenius") == 0, "fewer seeds than there are"


def test_a_stop_keeps_what_is_done(ablate, tmp_path, monkeypatch, capsys):
    whole = running._run

    def stop_at_second(config, task, row, *rest):
        if row.name != WHOLE:
            raise KeyboardInterrupt
        return whole(config, task, row, *rest)

    monkeypatch.setattr(running, "_run", stop_at_second)
    assert ablate("--seeds", 1) == 130
    assert "Continue with the same command" in capsys.readouterr().err
    assert [trial["row"] for trial in result(tmp_path / "ablation")["trials"]] == [WHOLE]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "unicorn"), "No row has 'unicorn' in its name"),
        (("--seeds", 0), "--seeds is 1 or more; got 0"),
        (("--lambda0", -1), "--lambda0 is positive"),
    ],
)
def test_mistakes_are_answered_with_a_line(ablate, words, message, capsys):
    assert ablate(*words) == 2
    assert message in capsys.readouterr().err


def test_other_settings_are_refused(ablate, capsys):
    assert ablate("--seeds", 1, "--rows", "Frobenius") == 0
    assert ablate("--seeds", 1, "--rows", "Frobenius", "--lambda0", 2) == 2
    assert "other settings" in capsys.readouterr().err


def test_rows_come_with_those_they_are_compared_with():
    named = [row.name for row in rows_named(["momentum on the gradient"])]
    assert named == [WHOLE, "Nesterov momentum on the gradient", "K-FAC's momentum on the gradient"]
    assert rows_named([]) == ROWS
    assert [row.name for row in rows_named(["k-fac"])] == [WHOLE], "a whole name is that row alone"


def test_a_line_is_the_best_variant_over_the_seeds():
    base = Row("base", "", {"": None}, against="base")
    grid = Row("grid", "", {"a": None, "b": None}, against="base")
    mean = Row("mean", "", {}, against="base")
    done = [
        Trial("base", "", 0, [8.0, 4.0, 2.0], 1.0, 5.0),
        Trial("base", "", 1, [8.0, 4.0, 4.0], None, 7.0),
        Trial("grid", "a", 0, [9.0, 9.0, None], None, 1.0),
        Trial("grid", "b", 0, [9.0, 9.0, 8.0], 8.0, 1.0),
        Trial("grid", "b", 1, [9.0, 9.0, 8.0], 8.0, 3.0),
    ]
    trials = {(t.row, t.variant, t.seed): t for t in done}
    base_line, grid_line, mean_line = lines_of((base, grid, mean), trials, 10)
    assert (base_line.end, base_line.least, base_line.most, base_line.ratio) == (3, 2, 4, 1)
    assert (grid_line.variant, grid_line.end, grid_line.seconds) == ("b !", 8.0, 2.0), (
        "the last one tried"
    )
    assert grid_line.ratio == 3.0, "the median of 8/2 and 8/4"
    assert mean_line.most == math.inf, "a seed that diverged"
    assert math.isnan(mean_line.quarter)


def test_there_is_no_ratio_to_nothing():
    base = Row("base", "", {"": None}, against="base")
    other = Row("other", "", {"": None}, against="base")
    for end in (0.0, None):
        done = [Trial("base", "", 0, [1.0, 1.0, end], None, 1.0),
                Trial("other", "", 0, [1.0, 1.0, 1.0], None, 1.0)]  # fmt: skip
        trials = {(t.row, t.variant, t.seed): t for t in done}
        assert math.isnan(lines_of((base, other), trials, 10)[1].ratio)


def settings_of(name, variant=""):
    """Settings of the optimizer that a row makes."""
    row = next(row for row in ROWS if row.name.startswith(name))
    config = TrainConfig("curves", kfac=KfacOptions(lambda0=2.0), weight_decay=0.1, seed=7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    return row.variants[variant](config, model, kronfac.Bernoulli()).optimizer.settings


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ("block-tri", {"inverse": kronfac.BlockTridiagonalInverse()}),
        ("no mom", {"step_size": kronfac.QuadraticModel(momentum=False)}),
        ("exact T", {"inverse": BlockDiagonalInverse(tikhonov=ExactTikhonov())}),
        ("π = 1", {"inverse": BlockDiagonalInverse(tikhonov=FactoredTikhonov("one"))}),
        ("π by the F", {"inverse": BlockDiagonalInverse(tikhonov=FactoredTikhonov("frobenius"))}),
        ("π by the s", {"inverse": BlockDiagonalInverse(tikhonov=FactoredTikhonov("spectral"))}),
        ("γ = √", {"gamma": kronfac.TiedGamma()}),
        ("γ judged", {"gamma": kronfac.GammaSearch(maximum=1.0, criterion="objective")}),
        ("4 sampled", {"fisher": kronfac.SampledFisher(seed=7, samples=4)}),
        ("empirical", {"fisher": kronfac.EmpiricalFisher()}),
        ("τ₂ = 1", {"fisher_fraction": 1.0}),
        ("K-FAC's", {"inverse": NoInverse(), "gamma": kronfac.FixedGamma()}),
    ],
)
def test_a_row_changes_what_it_says_and_nothing_else(row, changed):
    assert settings_of(row) == replace(settings_of(WHOLE), **changed)


def test_rows_with_a_constant_to_choose_have_it():
    whole = settings_of(WHOLE)
    assert whole.damping.lambda_ == 2.0
    assert whole.statistics_fraction == 1 / 8
    assert settings_of("Heskes", "γ = 3") == replace(
        whole,
        gamma=kronfac.FixedGamma(3),
        step_size=kronfac.RawStep(),
        inverse=BlockDiagonalInverse(tikhonov=FactoredTikhonov("one")),
    )
    assert settings_of("plain", "λ₀ × 100") == replace(
        whole,
        damping=kronfac.LevenbergMarquardt(lambda_=200.0),
        gamma=kronfac.TiedGamma(),
        step_size=PlainStep(),
        inverse=BlockDiagonalInverse(tikhonov=ExactTikhonov()),
    )


def test_plain_tikhonov_predicts_half_the_slope():
    """M(Δ) − M(0) = ∇hᵀΔ + ½ ΔᵀBΔ with BΔ = −∇h."""
    torch.manual_seed(0)
    root, g = torch.randn(3, 3).double(), torch.randn(3).double()
    B = root @ root.T + torch.eye(3)
    delta = -torch.linalg.solve(B, g)
    state, m = kronfac.StepState(), kronfac.Measurement()
    predicted = PlainStep().solve([[1.0]], [float(g @ delta)], state, m).predicted_change
    assert predicted == pytest.approx(float(g @ delta + delta @ B @ delta / 2))


def test_a_row_that_diverges_is_a_result(ablate, tmp_path, monkeypatch, capsys):
    def wild(config, model, loss):
        options = FirstOrderOptions(lr=1e30)
        return FirstOrderStepper(
            replace(config, optimizer="sgd", kfac=KfacOptions(), first_order=options), model, loss
        )

    row = Row("wild", "", {"": wild})
    monkeypatch.setattr(rows, "ROWS", (ROWS[0], row))
    assert ablate("--seeds", 1) == 0
    assert result(tmp_path / "ablation")["trials"][1]["errors"][-1] is None
    assert "diverged" in (tmp_path / "ablation" / "ablate.md").read_text()


def test_sizes_are_said_as_they_are_used(ablate, tmp_path):
    assert ablate("--seeds", 1, "--rows", WHOLE, "--batch", 5000) == 0
    text = (tmp_path / "ablation" / "ablate.md").read_text()
    assert "mini-batches of 167" in text, "the training cases of 200"


def test_without_an_inverse_the_step_is_the_gradient_rescaled_by_the_exact_fisher():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)
    ).double()
    loss = kronfac.Gaussian()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    F = exact_fisher(model, loss, x).dense
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    g = torch.autograd.grad(loss(model(x), y), model.parameters())
    # The Fisher's order is layer by layer, vec of (out, in + 1).
    g_matrix = [torch.cat([W, b[:, None]], dim=1) for W, b in zip(g[::2], g[1::2], strict=True)]
    v = torch.cat([G.T.flatten() for G in g_matrix])
    alpha = v @ v / (v @ F @ v + 0.5 * v @ v)
    optimizer = kronfac.KFAC(
        model,
        loss,
        inverse=NoInverse(),
        damping=kronfac.FixedDamping(0.5),
        step_size=kronfac.QuadraticModel(momentum=False),
    )
    optimizer.step(optimizer.closure(x, y))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved = torch.cat([part.flatten() for part in g])
    torch.testing.assert_close(after - before, -alpha * moved, rtol=1e-9, atol=1e-12)

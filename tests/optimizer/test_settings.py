"""Every alternative, as a run against the pseudocode with the same alternative."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac import (
    KFAC,
    FixedDamping,
    FixedGamma,
    GammaSearch,
    Intervals,
    LevenbergMarquardtRule,
    QuadraticModel,
    RawStep,
)
from kronfac.curvature import ema_decay
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    DampingState,
    ExactFisher,
    ExactTikhonov,
    First,
    GammaState,
    Measurement,
    SampledFisher,
)
from kronfac.linalg import KroneckerProduct, OuterProduct
from kronfac.step.examples import shares
from tests.conftest import mlp, normal
from tests.optimizer.pseudocode import Pseudocode, low_rank_is_cheaper
from tests.optimizer.runs import agree, targets_for
from tests.reference import dense

LOSS = nn.MSELoss(reduction="sum")
STEPS = 13
# T₁ = 2, T₂ = 6, T₃ = 3 unless a setting says otherwise.
OURS = {
    "weight_decay": 1e-2,
    "fisher": "exact",
    "damping": LevenbergMarquardtRule(lambda_=0.5, interval=2),
    "gamma": GammaSearch(interval=6),
    "intervals": Intervals(inverse_interval=3),
}
THEIRS = {"eta": 1e-2, "lambda_": 0.5, "T1": 2, "T2": 6, "T3": 3, "gamma_min": 0.1}


class TiedGamma(kronfac.extend.GammaRule[kronfac.extend.GammaState]):
    """γ = √(λ + η): one damping strength for both, as in §6.3 before §6.6 separates them."""

    def init(self, m):
        return kronfac.extend.GammaState(math.sqrt(m.lambda_ + m.weight_decay))

    def candidates(self, state, m):
        return (math.sqrt(m.lambda_ + m.weight_decay),)


def data(step: int, loss: nn.Module = LOSS, cases: int = 15) -> tuple[Tensor, Tensor]:
    x = normal(cases, 4, seed=50 + step)
    return x, targets_for(loss, mlp([4, 3], seed=9, gain=2.0)(x).detach(), seed=step)


# Our setting, and the pseudocode's.
SETTINGS = {
    # Not re-scaled, an update needs much damping; with less the run diverges, rounding first.
    "raw": (
        {"step_rule": RawStep(), "gamma": FixedGamma(6.0)},
        {"raw_alpha": 1.0, "gamma": 6.0, "T2": None},
    ),
    "raw_half": (
        {"step_rule": RawStep(alpha=0.5), "gamma": FixedGamma(4.0)},
        {"raw_alpha": 0.5, "gamma": 4.0, "T2": None},
    ),
    "no_momentum": (
        {"step_rule": QuadraticModel(momentum=False, bounded=False, memory=None)},
        {"momentum": False},
    ),
    "fixed_gamma": ({"gamma": FixedGamma(0.7)}, {"gamma": 0.7, "T2": None}),
    "first_gamma": ({"gamma": FixedGamma()}, {"T2": None}),
    "tied_gamma": ({"gamma": TiedGamma()}, {"tied": True}),
    "fixed_lambda": ({"damping": FixedDamping(0.3)}, {"lambda_": 0.3, "T1": None}),
    "no_lambda": (
        {"damping": FixedDamping(0.0), "gamma": FixedGamma(0.4)},
        {"lambda_": 0.0, "T1": None, "gamma": 0.4, "T2": None},
    ),
    "by_model": (
        {"gamma": GammaSearch(interval=2), "intervals": Intervals(inverse_interval=2)},
        {"T2": 2, "T3": 2},
    ),
    "bounds": (
        {"gamma": GammaSearch(interval=3, minimum=0.6, maximum=0.65)},
        {"T2": 3, "gamma_min": 0.6, "gamma_max": 0.65},
    ),
    "exact_tikhonov": (
        {"inverse": BlockDiagonalInverse(ExactTikhonov())},
        {"exact_tikhonov": True},
    ),
    "equation_5": (
        {"inverse": BlockDiagonalInverse(ExactTikhonov()), "gamma": TiedGamma()},
        {"exact_tikhonov": True, "tied": True},
    ),
    "class": ({"inverse": BlockTridiagonalInverse, "fisher": ExactFisher}, {"tridiagonal": True}),
    "refresh_always": ({"intervals": Intervals(inverse_interval=1)}, {"T3": 1}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_equals_the_pseudocode_with_it(setting):
    ours, theirs = SETTINGS[setting]
    model = mlp([4, 5, 4, 3], seed=3)
    optimizer = KFAC(model, LOSS, **OURS | ours)
    expected = Pseudocode(model, LOSS, **THEIRS | theirs)
    for step in range(STEPS):
        agree(optimizer, expected, *data(step))


# ----------------------------------------------------------------------------- where targets come from


def score_moments(loss: nn.Module, z: Tensor, targets: list[Tensor], m: int) -> Tensor:
    """c E[∇(−log r) ∇(−log r)ᵀ] of every case over several targets, from gradients of the loss.

    The gradient of the loss over the mini-batch is c/m times the score.
    """
    scale = {"mean": 1.0, "sum": float(m)}[getattr(loss, "reduction", "mean")]
    if isinstance(loss, (nn.MSELoss, nn.BCEWithLogitsLoss)) and loss.reduction == "mean":
        scale /= z.shape[1]
    K = torch.zeros(len(z), z.shape[1], z.shape[1], dtype=z.dtype)
    for y in targets:
        z = z.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(z, y), z)
        score = gradient * m / scale
        K += scale * score.unsqueeze(2) * score.unsqueeze(1) / len(targets)
    return K


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
        nn.BCEWithLogitsLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        kronfac.Gaussian(variance=0.4),
        kronfac.Bernoulli(),
    ],
    ids=str,
)
@pytest.mark.parametrize("tridiagonal", [False, True])
def test_the_empirical_fisher(loss, tridiagonal):
    model = mlp([4, 5, 4, 3], seed=3)
    inverse = "block_tridiagonal" if tridiagonal else "block_diagonal"
    optimizer = KFAC(model, loss, **OURS | {"fisher": "empirical", "inverse": inverse})
    expected = Pseudocode(model, loss, tridiagonal=tridiagonal, **THEIRS)
    for step in range(7):
        x, y = data(step, loss)
        K = score_moments(loss, expected.model(x), [y], len(x))
        agree(optimizer, expected, x, y, K=K)


def remembering(kind: type[kronfac.objective.Likelihood]):
    """A likelihood of this kind that keeps the targets it drew."""

    class Remembering(kind):
        drawn: list[Tensor]

        def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
            # A Gaussian's score needs no target; this is the one that the draw stands for.
            self.drawn.append(self.sample(outputs, noise))
            return super().sampled_score(outputs, noise)

    loss = Remembering()
    loss.drawn = []
    return loss


@pytest.mark.parametrize("kind", [kronfac.Gaussian, kronfac.Bernoulli, kronfac.Categorical])
@pytest.mark.parametrize("samples", [1, 3])
def test_sampled_targets_enter_as_their_mean(kind, samples):
    loss = remembering(kind)
    model = mlp([4, 5, 4, 3], seed=3)
    fisher = SampledFisher(samples=samples, seed=8)
    optimizer = KFAC(
        model,
        loss,
        **OURS | {"fisher": fisher, "intervals": Intervals(First(0.5), None, 3)},
    )
    expected = Pseudocode(model, loss, tau1=0.5, **THEIRS)
    for step in range(7):
        x, y = data(step, loss)
        loss.drawn.clear()
        # The pseudocode needs the targets that our step is going to draw: a rehearsal finds them.
        rehearse(optimizer, x, y)
        assert len(loss.drawn) == samples
        z = expected.model(x[:8])
        K = score_moments(kind(), z, list(loss.drawn), len(z))
        agree(optimizer, expected, x, y, K=K)


def rehearse(optimizer: KFAC, x: Tensor, y: Tensor) -> None:
    """Take a step and take it back."""
    parameters = {name: p.detach().clone() for name, p in optimizer.model.named_parameters()}
    state = optimizer.state_dict()
    optimizer.step(optimizer.closure(x, y))
    optimizer.model.load_state_dict(parameters)
    optimizer.load_state_dict(state)


# ------------------------------------------------------------------------------------ the low-rank route


WIDTHS = [4, 9, 9, 3]
FEW = 3  # cases, fewer than most layers are wide


def test_the_low_rank_route_is_taken_by_some_layers_and_not_by_others():
    taken = [low_rank_is_cheaper(*shape, FEW) for shape in dense.shapes(mlp(WIDTHS))]
    assert taken == [True, True, False]


def test_without_weight_decay_the_low_rank_route_is_the_plain_one():
    ends = []
    for low_rank in (False, True, None):
        inverse = BlockDiagonalInverse(low_rank=low_rank)
        optimizer = KFAC(
            mlp(WIDTHS, seed=3), LOSS, **OURS | {"weight_decay": 0.0, "inverse": inverse}
        )
        for step in range(STEPS):
            optimizer.step(optimizer.closure(*data(step, cases=FEW)))
        ends.append(dense.theta(optimizer.model))
    for other in ends[1:]:
        assert_close(other, ends[0], rtol=1e-8, atol=1e-10)


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Examples of the products that take the low-rank route from here on."""
    taken: list[int] = []
    product = KroneckerProduct.mv

    def counted(block: KroneckerProduct, V: Tensor | OuterProduct) -> Tensor:
        if isinstance(V, OuterProduct) and V.pays():
            taken.append(len(V.inputs))
        return product(block, V)

    monkeypatch.setattr(KroneckerProduct, "mv", counted)
    return taken


@pytest.mark.parametrize(("weight_decay", "cases", "taken"), [(0, 3, 2), (0, 5, 0), (0.1, 3, 0)])
def test_it_is_taken_by_itself_where_it_changes_nothing_and_saves_half(
    monkeypatch, weight_decay, cases, taken
):
    # Of one layer it saves half with 3 cases; then the other that it is cheaper for takes it too.
    found = products(monkeypatch)
    optimizer = KFAC(mlp(WIDTHS, seed=3), LOSS, weight_decay=weight_decay)
    optimizer.step(optimizer.closure(*data(0, cases=cases)))
    found.clear()
    optimizer.step(optimizer.closure(*data(1, cases=cases)))
    assert found == [cases] * taken


def test_nor_where_somebody_may_change_the_gradient(monkeypatch):
    found = products(monkeypatch)
    ends = []
    for low_rank in (False, None):
        model = mlp(WIDTHS, seed=3)
        optimizer = KFAC(model, LOSS, inverse=BlockDiagonalInverse(low_rank=low_rank))
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 0.5 * grad)
        for step in range(3):
            optimizer.step(optimizer.closure(*data(step, cases=FEW)))
        ends.append(dense.theta(model))
    assert not found
    assert torch.equal(*ends)


def test_nor_if_weight_decay_has_come_since_the_closure_was_made(monkeypatch):
    found = products(monkeypatch)
    optimizer = KFAC(mlp(WIDTHS, seed=3), LOSS)
    closure = optimizer.closure(*data(0, cases=FEW))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.step(closure)
    assert not found


# ------------------------------------------------------------------------------------------ presets


def test_the_papers_constants():
    # The table and "The step" of the notes on the authors' program, typed in.
    settings = kronfac.presets.paper()

    def updated(rho: float) -> float:
        return settings["damping"].update(DampingState(1.0), Measurement(rho=rho)).lambda_

    assert settings["damping"].lambda_ == 150
    assert settings["damping"].interval == 5
    assert updated(rho=0.9) == pytest.approx(0.77378094, rel=1e-7)  # 0.95⁵
    assert updated(rho=0.1) == pytest.approx(1.29235544, rel=1e-7)
    assert settings["gamma"].interval == 20
    assert settings["step_rule"].momentum is True
    assert settings["intervals"] == Intervals(0.125, 0.25, inverse_interval=20)
    # Of the method itself, not of the experiments.
    optimizer = KFAC(mlp([4, 3]), kronfac.Bernoulli(), weight_decay=1e-5, **settings)
    fisher, step_rule = optimizer.settings.fisher, optimizer.settings.step_rule
    assert fisher == SampledFisher(samples=1)
    assert step_rule.long_memory is None
    assert ema_decay(500, fisher.ema_decay) == 0.95
    assert optimizer.settings.inverse == BlockDiagonalInverse()
    assert not optimizer.settings.inverse.wants_factors(
        [(1000, 785)], examples=1, weight_decay=1e-5
    )
    assert optimizer.state_dict()["kfac"]["gamma"]["gamma"] == pytest.approx(12.247449, rel=1e-6)


def test_the_papers_gamma_follows_the_authors_log():
    eta = 1e-5

    def candidates(iteration: int, gamma: float, lambda_: float) -> tuple[float, ...]:
        m = Measurement(iteration=iteration, lambda_=lambda_, weight_decay=eta)
        return kronfac.presets.paper()["gamma"].candidates(GammaState(gamma), m)

    gamma = math.sqrt(150 + eta)
    assert candidates(19, gamma, 150.0) == (gamma,)
    # 12.247 at iterations 20 and 40, 7.333 at 60, 1.0 at 80, then a factor of 0.599 each time.
    assert sorted(candidates(20, gamma, 150.0)) == pytest.approx([1.0, 7.333, 12.247], rel=1e-4)
    assert sorted(candidates(60, 7.333, 20.0)) == pytest.approx([1.0, 4.391, 7.333], rel=1e-3)
    assert sorted(candidates(80, 1.0, 2.0)) == pytest.approx([0.599, 1.0], rel=1e-3)
    # γ_min = √η = 0.003162.
    assert sorted(candidates(400, 0.004, 1e-6)) == pytest.approx(
        [0.0031623, 0.004, 0.006681], rel=1e-3
    )


@pytest.mark.parametrize("tridiagonal", [False, True])
def test_the_papers_settings_equal_the_pseudocode(tridiagonal):
    model = mlp([4, 5, 4, 3], seed=3)
    loss = kronfac.Bernoulli()
    inverse = "block_tridiagonal" if tridiagonal else "block_diagonal"
    settings = kronfac.presets.paper() | {"inverse": inverse, "fisher": "exact"}
    optimizer = KFAC(model, loss, weight_decay=1e-5, **settings)
    expected = Pseudocode(
        model,
        loss,
        tridiagonal=tridiagonal,
        eta=1e-5,
        lambda_=150,
        T1=5,
        T2=20,
        T3=20,
        tau1=0.125,
        tau2=0.25,
        gamma_min=math.sqrt(1e-5),
        gamma_max=1.0,
    )
    for step in range(41):
        agree(optimizer, expected, *data(step, loss, cases=17))
    assert optimizer.report.lambda_ == pytest.approx(150 * 0.95**40, rel=1e-12)


def test_where_the_model_predicts_a_rise_lambda_rises_whatever_the_ratio():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).double()
    damping = LevenbergMarquardtRule(lambda_=1.0, interval=1)
    optimizer = KFAC(model, torch.nn.MSELoss(), damping=damping, step_rule=RawStep(alpha=100.0))
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    optimizer.step(optimizer.closure(x, y))
    assert optimizer.report.predicted_change > 0
    assert optimizer.report.rho > 1 / 4, "the loss did rise, as predicted"
    assert optimizer.report.lambda_ == pytest.approx(1 / 0.95)


# ------------------------------------------------------------------------------- on how many examples


@pytest.mark.parametrize(
    ("examples", "terms", "expected"),
    [
        (512, 512, 250),  # at least 250 terms
        (4000, 4000, 500),  # an eighth
        (64, 64 * 64, 8),  # an eighth, which has 512 terms
        (32, 32 * 64, 8),  # at least 8 sequences
        (512, 512 * 64, 64),  # an eighth
        (100, 400, 63),  # 250 terms are 62.5 examples
        (8, 8 * 64, 8),
    ],
)
def test_statistics_are_of_250_terms_and_8_examples_at_the_least(examples, terms, expected):
    share, _ = shares(Intervals(), examples, terms, convolutional=False)
    assert math.ceil(share * examples - 1e-9) == expected


@pytest.mark.parametrize(("examples", "expected"), [(512, (64, 128)), (32, (8, 8)), (4, (4, 4))])
def test_networks_with_convolutions_have_the_papers_fractions(examples, expected):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    x, y = torch.randn(examples, 1, 4, 4), torch.randint(3, (examples,))
    optimizer.step(optimizer.closure(x, y))
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    optimizer.step(optimizer.closure(x, y))
    assert set(seen) - {examples} == set(expected) - {examples}


def test_sequences_are_counted_by_their_terms():
    """Statistics see 8 of 64 sequences of 64 tokens, J v 16."""
    model = nn.Linear(3, 4)
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    x, y = torch.randn(64, 64, 3), torch.randint(4, (64 * 64,))
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    seen.clear()
    optimizer.step(closure)
    assert set(seen) == {64, 16, 8}

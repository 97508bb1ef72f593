"""What torch's users expect of an optimizer: groups, states, copies, schedulers, scalers, clear errors."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac import WhitenedMomentum
from kronfac.errors import LoopError
from kronfac.whitened_momentum import InputFactors

FREQUENT = InputFactors(interval=3, rows=16)


class Network(nn.Module):
    """A convolution, packed gates and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Conv2d(1, 4, 3)
        self.cell = nn.GRU(16, 12, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self.norm(self.cell(self.features(x).flatten(2))[0]))
        return z


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(16, 1, 6, 6, generator=generator)
    return x, torch.randint(3, (16, 4), generator=generator)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for k in range(first, last):
        x, y = batch(k)
        optimizer.zero_grad()
        x = x.to(next(model.parameters()).dtype)
        functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved_and_loaded(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"method": "whitened"}, {"steps": 20}, {"inputs": None}])
def test_a_run_resumes_bit_for_bit(settings, dtype):
    model = Network().to(dtype)
    settings = {"inputs": FREQUENT, **settings}
    optimizer = WhitenedMomentum(model, **settings)
    run(model, optimizer, 0, 7)
    weights, state = map(saved_and_loaded, (model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, 7, 14)
    other = Network().to(dtype)
    other.load_state_dict(weights)
    resumed = WhitenedMomentum(other, **settings)
    resumed.load_state_dict(state)
    run(other, resumed, 7, 14)
    assert torch.equal(flat(model), flat(other))
    assert resumed.report.methods == optimizer.report.methods
    assert all(t.dtype == torch.float32 for s in resumed.state.values() for t in s.values()
               if isinstance(t, Tensor))  # fmt: skip


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("before", [0, 4])
def test_copies_go_on_as_it_would(copied, before):
    model = Network()
    optimizer = WhitenedMomentum(model, inputs=FREQUENT)
    run(model, optimizer, 0, before)
    other, theirs = copied((model, optimizer))
    for one, own in ((model, optimizer), (other, theirs)):
        run(one, own, before, 9)
    assert torch.equal(flat(model), flat(other))
    assert not torch.equal(flat(model), flat(Network()))


def test_groups_have_rates_decays_and_methods_of_their_own():
    model = Network()
    groups = [
        {"params": model.features.parameters(), "lr": 0.0},
        {"params": model.cell.parameters(), "method": "whitened", "weight_decay": 0.5},
        {"params": [*model.norm.parameters()], "betas": (0.5, 0.5)},
    ]
    optimizer = WhitenedMomentum(model, params=groups)
    frozen, head = model.features.weight.detach().clone(), model.head.weight.detach().clone()
    run(model, optimizer, 0, 3)
    assert torch.equal(model.features.weight, frozen)
    assert torch.equal(model.head.weight, head)
    assert optimizer.report.methods["whitened"] == ["cell.weight_ih_l0", "cell.weight_hh_l0"]
    optimizer.add_param_group({"params": [model.head.weight], "method": "polar"})
    run(model, optimizer, 3, 5)
    assert not torch.equal(model.head.weight, head)
    assert "head.weight" in optimizer.report.methods["polar"]
    assert optimizer.param_groups[-1]["iteration"] == optimizer.report.iteration == 5


def test_named_parameters_rates_in_tensors_and_hooks_of_a_step():
    ends, calls = [], []
    for given in (lambda m: m.parameters(), lambda m: m.named_parameters()):
        model = Network()
        optimizer = WhitenedMomentum(model, torch.tensor(0.01), params=given(model), steps=10)
        optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
        optimizer.register_step_post_hook(lambda *given: calls.append("after"))
        run(model, optimizer, 0, 2)
        ends.append(flat(model))
    assert torch.equal(*ends)
    assert calls == ["before", "after"] * 4


def test_vectors_are_not_decayed_unless_a_group_says_so():
    model = Network()
    assert [group["weight_decay"] for group in WhitenedMomentum(model).param_groups] == [0.1, 0.0]
    (group,) = WhitenedMomentum(model, params=model.parameters()).param_groups
    assert group["weight_decay"] == 0.1


def test_a_scheduler_sets_the_rate_or_the_horizon_does_but_not_both():
    model = Network()
    optimizer = WhitenedMomentum(model, 0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4)
    for k in range(4):
        run(model, optimizer, k, k + 1)
        scheduler.step()
    assert optimizer.report.lr == [0.0, 0.0]
    both = WhitenedMomentum(model, 0.1, steps=4)
    torch.optim.lr_scheduler.LinearLR(both, 1.0, 0.0, 4)
    with pytest.raises(LoopError, match="Leave out steps= and seconds="):
        run(model, both, 0, 1)
    with pytest.raises(ValueError, match="steps or of seconds, or neither"):
        WhitenedMomentum(model, steps=4, seconds=3.0)


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing():
    model = Network()
    optimizer = WhitenedMomentum(model, inputs=FREQUENT)
    run(model, optimizer, 0, 2)
    before, state = flat(model), copy.deepcopy(optimizer.state_dict()["state"])
    x, y = batch(2)
    optimizer.zero_grad()
    functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    model.head.weight.grad[0, 0] = float("inf")
    model.features.weight.grad[0] = float("nan")
    optimizer.step()
    assert torch.equal(flat(model), before)
    for number, old in state.items():
        new = optimizer.state_dict()["state"][number]
        kept = {"momentum", "exp_avg", "exp_avg_sq", "step"} & old.keys()
        assert all(torch.equal(old[key], new[key]) for key in kept)
    assert (optimizer.report.skipped, optimizer.report.iteration) == (1, 3)
    run(model, optimizer, 3, 5)
    assert optimizer.report.skipped == 1
    assert not torch.equal(flat(model), before)


def test_a_factor_that_is_not_finite_leaves_the_last_good_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = WhitenedMomentum(model, method="polar", inputs=InputFactors(interval=1))
    weight = model[0].weight
    for k, value in enumerate((1.0, float("inf"), 0.0, 1.0)):
        x = torch.full((8, 4), value)
        optimizer.zero_grad()
        model(x)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model(x).sum().detach().requires_grad_(True)
        optimizer.step()
        if k == 0:
            first = optimizer.state[weight]["inverse"].clone()
        if k == 1:
            assert "0.weight" in optimizer.report.failures
            assert torch.equal(optimizer.state[weight]["inverse"], first)
    assert "0.weight" not in optimizer.report.failures


def test_a_factor_that_was_never_good_is_none_at_all():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = WhitenedMomentum(model, method="polar", inputs=InputFactors(interval=1))
    before = model[0].weight.detach().clone()
    for _ in range(2):
        model(torch.zeros(8, 4)).sum().backward()
        model[0].weight.grad.normal_()
        optimizer.step()
    assert "not positive definite" in optimizer.report.failures["0.weight"]
    assert "inverse" not in optimizer.state[model[0].weight]
    assert model[0].weight.isfinite().all()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("method", ["auto", "polar", "whitened"])
def test_an_ordinary_step_does_not_wait_for_the_device(method):
    model = Network().to("meta")  # where no number can be read
    optimizer = WhitenedMomentum(model, method=method, steps=10, inputs=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.empty_like(p)
            optimizer.step()
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(optimizer.report.skipped)


def test_a_loss_in_float16_with_a_scaler_and_autocast():
    model = Network()
    optimizer = WhitenedMomentum(model, inputs=FREQUENT)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for k in range(4):
        x, y = batch(k)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        if k == 2:
            model.head.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.report.iteration == 3
    assert optimizer.state[model.features.weight]["A"].dtype == torch.float32
    assert flat(model).isfinite().all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: WhitenedMomentum(m.parameters()), TypeError, "needs the model itself"),
        (lambda m: WhitenedMomentum(m, -1.0), ValueError, "lr has to be finite and not negative"),
        (lambda m: WhitenedMomentum(m, weight_decay=-1.0), ValueError, "weight_decay has to be finite"),
        (lambda m: WhitenedMomentum(m, betas=(0.9, 1.0)), ValueError, "at least 0 and below 1"),
        (lambda m: WhitenedMomentum(m, nn.MSELoss()), TypeError, "needs no loss"),
        (lambda m: WhitenedMomentum(m, method="muon"), ValueError, "method has to be one of"),
        (lambda m: WhitenedMomentum(m.to(torch.complex64)), ValueError, "'features.weight' is complex"),
    ],
)  # fmt: skip
def test_mistakes_in_the_constructor(make, error, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Network()
        with pytest.raises(error, match=message):
            make(model)


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    optimizer = WhitenedMomentum(model)
    model(torch.arange(5)).sum().backward()
    with pytest.raises(ValueError, match=r"'0\.weight' has a sparse gradient"):
        optimizer.step()


def test_odd_parameters_are_trained_or_left_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.row, self.empty = nn.Linear(6, 1, bias=False), nn.Parameter(torch.empty(0, 3))
            self.number, self.unused = nn.Parameter(torch.ones(())), nn.Linear(2, 2)
            self.head = nn.Linear(1, 2)

        def forward(self, x):
            return self.head(self.row(x) * self.number) + self.empty.sum()

    model = Odd()
    optimizer = WhitenedMomentum(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        model(torch.randn(9, 6)).square().sum().backward()
        optimizer.step()
    same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert same == {"empty", "unused.weight", "unused.bias"}
    assert set(optimizer.report.methods) == {"adam"}


def test_parameters_outside_of_the_model_and_a_layer_that_was_replaced():
    model = Network()
    optimizer = WhitenedMomentum(model)
    scale = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [scale]})
    model.head = nn.Linear(12, 3)
    optimizer.add_param_group({"params": model.head.parameters()})
    before = flat(model)
    scale.grad = torch.ones_like(scale)
    run(model, optimizer, 0, 2)
    scale.grad = torch.ones_like(scale)
    optimizer.step()
    assert "a parameter of shape (2, 2)" in optimizer.report.methods["adam"]
    assert not torch.equal(flat(model), before)

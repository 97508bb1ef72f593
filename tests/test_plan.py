"""`kronfac.plan`: what it says is what happens, and nothing is touched."""

import gc
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import kronfac
from kronfac import KFAC, Intervals, plan
from kronfac.errors import ExampleError, UnsupportedModelError
from kronfac.planning import readable
from kronfac.storage import tensors_in

INVERSES = ["block_diagonal", "block_tridiagonal", "ekfac"]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 9, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(7, 16) * 0.1)
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids) + self.position
        a = self.norm(h)
        h = h + functional.scaled_dot_product_attention(self.q(a), self.k(a), self.v(a))
        h = h + self.down(functional.gelu(self.up(h)))
        return self.head(h.mean(dim=1))


EXAMPLES = {
    "perceptron": (perceptron, lambda: torch.randn(30, 20)),
    "convolutions": (convolutions, lambda: torch.randn(30, 3, 8, 8)),
    "transformer": (Transformer, lambda: torch.randint(20, (30, 7))),
}


def take_steps(optimizer: KFAC, x: Tensor, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.step(optimizer.closure(x, torch.arange(len(x)) % 5))


def held(optimizer: KFAC) -> int:
    """Bytes of the state's tensors, each once; the generator's state left out."""
    state = optimizer.state_dict()["kfac"]
    tensors = tensors_in({name: part for name, part in state.items() if name != "generator"})
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_a_model_without_storage_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"on the meta device\. Plan for a narrower"):
        plan_of(perceptron().to("meta"), torch.randn(30, 20, device="meta"))


# -------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("network", EXAMPLES)
def test_the_state_has_the_planned_size(network, inverse):
    torch.manual_seed(0)
    build, examples = EXAMPLES[network]
    model, x = build(), examples()
    planned = plan(model, nn.CrossEntropyLoss(), x, inverse=inverse).state
    optimizer = KFAC(model, nn.CrossEntropyLoss(), inverse=inverse)
    take_steps(optimizer, x)
    memory = optimizer._state.step.memory
    assert memory.average is None  # not noisy
    assert planned == pytest.approx(held(optimizer), rel=0.1)
    if inverse != "block_tridiagonal":  # whose ranks depend on the data
        assert planned == held(optimizer)


@pytest.mark.parametrize(
    ("settings", "vectors"),
    [
        ({"damping": kronfac.AdaptiveDamping(reject=None)}, 1),
        ({"damping": kronfac.FixedDamping(1.0)}, 1),
        ({}, 3),
    ],
)
def test_vectors_that_the_rules_keep(settings, vectors):
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(30, 20)
    size = sum(p.numel() for p in model.parameters()) * 4
    factors = sum(4 * (row.shape[0] ** 2 + row.shape[1] ** 2) for row in plan_of(model, x).rows)
    assert plan_of(model, x, **settings).state == 2 * factors + vectors * size


def plan_of(model: nn.Module, x: Tensor, **settings: object) -> kronfac.planning.Plan:
    return plan(model, nn.CrossEntropyLoss(), x, **settings)


def test_the_exact_form_has_eigenvectors_of_both_sides():
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(30, 20)
    inverse = kronfac.extend.BlockDiagonalInverse(kronfac.extend.ExactTikhonov())
    planned = plan(model, nn.CrossEntropyLoss(), x, inverse=inverse).state
    optimizer = KFAC(model, nn.CrossEntropyLoss(), inverse=inverse)
    take_steps(optimizer, x)
    assert planned == held(optimizer)


def test_tokens_count_when_the_plan_draws_examples():
    made = plan(OwnLoss(), nn.CrossEntropyLoss(), {"input_ids": torch.randint(20, (64, 40))})
    # Without targets the loss takes outputs (64, 40, 20) for 20 terms of each example: 250 are 13 of these.
    assert (made.statistics_examples, made.fisher_examples) == (13, 16)


# ----------------------------------------------------------------------------------- nothing is touched


def test_nothing_is_touched():
    torch.manual_seed(0)
    model = nn.Sequential(convolutions(), nn.Dropout(0.3), nn.Linear(5, 5))
    model[2].bias.grad = torch.ones(5)
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    pointers = {name: t.data_ptr() for name, t in model.state_dict(keep_vars=True).items()}
    graph = model[2](torch.randn(2, 5)).sum()
    random = torch.get_rng_state()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), inverse="block_tridiagonal")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state, network = optimizer._state, optimizer.network
    x, y = torch.randn(6, 3, 8, 8, generator=torch.Generator()), torch.arange(6) % 5
    plan(model, nn.CrossEntropyLoss(), x, y, inverse="block_tridiagonal")
    assert torch.equal(torch.get_rng_state(), random)
    for name, t in model.state_dict(keep_vars=True).items():
        assert torch.equal(t, kept[name]), name
        assert t.data_ptr() == pointers[name]
    assert [p.grad is None for p in model[0].parameters()] == [True] * len([*model[0].parameters()])
    assert torch.equal(model[2].bias.grad, torch.ones(5))
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert optimizer._state is state
    assert optimizer.network is network
    assert not network.learned.dims
    graph.backward()  # it is still valid


# ----------------------------------------------------------------------------------------------- rows


def test_what_each_parameter_gets():
    made = plan(
        convolutions(), nn.CrossEntropyLoss(), torch.randn(6, 3, 8, 8), inverse="block_tridiagonal"
    )
    rows = {row.name: row for row in made.rows}
    assert rows["0"].parameters == ("0.weight", "0.bias")
    assert rows["0"].block == "dense"
    assert rows["3"].block == "Kronecker (16, 73)"
    assert rows["3"].factors == "A 73×73, G 16×16"
    assert rows["3"].count == 16 * 73
    assert rows["8"].block == "Kronecker (5, 13)"
    assert made.chains == (("6", "8"),)
    assert made.engine == "forward mode"
    assert not made.fallbacks
    assert made.statistics_examples == made.examples == 6


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 30)
        self.mix = nn.Parameter(torch.randn(30, 30) * 0.1)
        self.head = nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("ni,ij->nj", self.first(x), self.mix).tanh())


def test_fallbacks_are_named():
    model, x = Einsum(), torch.randn(10, 6)
    made = plan(model, nn.CrossEntropyLoss(), x)
    (row,) = made.fallbacks
    assert row.name == "mix"
    assert row.block == "diagonal"
    assert "einsum" in row.why
    assert "'mix': diagonal: used in torch's einsum, which KFAC does not understand" in str(made)
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    take_steps(optimizer, x, 1)
    assert [u.name for u in optimizer.network.units if not u.observed] == ["mix"]


class Detached(nn.Module):
    """Uses its weight by a function of its own, whose product nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x) + Twice.apply(self.layer.weight))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return 2 * weight[0]

    @staticmethod
    def backward(ctx, g):
        grad = g.new_zeros(6, 6)
        grad[0] = 2 * g.sum(dim=0) if g.dim() > 1 else 2 * g
        return grad


def test_uses_that_are_not_seen_are_found_by_the_gradient():
    made = plan_of(Detached(), torch.randn(10, 6))
    (row,) = made.fallbacks
    assert row.name == "layer"
    assert "gradient" in row.why
    assert made.engine == "finite differences"


def test_frozen_parts_have_no_row():
    model = perceptron()
    model[0].requires_grad_(False)
    assert [row.name for row in plan_of(model, torch.randn(10, 20)).rows] == ["2", "4"]


def test_a_wide_side_says_so():
    made = plan_of(perceptron(), torch.randn(10, 20), blocks=kronfac.Blocks(wide_limit=35))
    assert made.rows[0].block == "Kronecker (40 diagonal, 21)"
    assert made.rows[0].factors == "A 21×21, G 40"
    assert "wider than 35" in made.rows[0].why
    assert not made.fallbacks


# -------------------------------------------------------------------------------------------- examples


class OwnLoss(nn.Module):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = functional.cross_entropy(logits.reshape(-1, 20), labels.reshape(-1))
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("labels", [True, False])
def test_a_model_with_its_loss_inside(labels):
    ids = torch.randint(20, (6, 7))
    batch = {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}
    made = plan(OwnLoss(), nn.CrossEntropyLoss(), batch)
    assert [row.block for row in made.rows] == ["dense", "Kronecker (20, 9)"]
    assert made.examples == 6
    assert made.engine == "forward mode"


def test_several_arguments():
    model = nn.Bilinear(3, 4, 5)
    made = plan(model, nn.MSELoss(), (torch.randn(10, 3), torch.randn(10, 4)), torch.randn(10, 5))
    assert made.examples == 10


def test_an_example_that_the_model_cannot_take():
    with pytest.raises(
        ExampleError, match=r"Sequential got a tensor \(10, 7\).*Pass what you call"
    ):
        plan_of(perceptron(), torch.randn(10, 7))


def test_targets_that_do_not_fit():
    with pytest.raises(ExampleError, match=r"MSELoss.*\(10, 3\).*\(10, 5\).*targets that fit"):
        plan(perceptron(), nn.MSELoss(), torch.randn(10, 20), torch.randn(10, 3))


def test_outputs_without_gradients():
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).detach()

    with pytest.raises(ExampleError, match="outputs, which need gradients"):
        plan(Cut(), nn.MSELoss(), torch.randn(4, 3))


# ------------------------------------------------------------------------------------------------ cost


@pytest.fixture
def free_calls(monkeypatch):
    """Costs are multiplications alone."""
    monkeypatch.setattr(kronfac.planning, "CALL", 0.0)


@pytest.mark.usefixtures("free_calls")
def test_the_cost_of_a_perceptron_is_the_operation_count():
    """Two layers (a, b) and (b, c) on m examples, all of them in S₁ and S₂."""
    a, b, c, m = 20, 40, 10, 100
    model = nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh(), nn.Linear(b, c, bias=False))
    made = plan(model, nn.MSELoss(), torch.randn(m, a), intervals=Intervals(inverse_interval=10))
    forward, backward = m * (a * b + b * c), m * b * c  # nothing goes back to the first inputs
    sgd = 2 * forward + backward + a * b + b * c
    moments = m * (a * a + 2 * b * b + c * c)
    inversions = 2 * (a**3 + 2 * b**3 + c**3) / 2  # for two γ
    product = a * b * (a + b) + b * c * (b + c)
    expected = {
        "gradient": sgd,
        "statistics": backward + moments,
        "Fisher products": 2 * (forward + backward),
        "refreshes": inversions / 10,
        "preconditioning": 1.1 * product,
        "validation": forward / 5,
        "the rest": 0,
    }
    assert {name: round(sgd * value) for name, value in made.cost.items()} == {
        name: round(value) for name, value in expected.items()
    }
    assert made.sgd_steps == pytest.approx(sum(expected.values()) / sgd)
    units = moments + inversions / 10 + 1.1 * product
    assert sum(row.cost for row in made.rows) == pytest.approx(units / sgd)


class Adapted(nn.Module):
    """A frozen layer with a trained path of low rank beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen(x) + self.up(self.down(x))).tanh()


@pytest.mark.usefixtures("free_calls")
def test_frozen_layers_cost_their_passes_and_no_products_for_weights():
    """Two blocks n → n with paths n → r → n; J v repeats the forward pass for each direction.

    In a product that has one tangent, torch multiplies with the other one too, which is zero.
    """
    n, r, m = 30, 2, 100
    model = nn.Sequential(Adapted(n, r), Adapted(n, r))
    made = plan(model, nn.MSELoss(), torch.randn(m, n), intervals=Intervals(fisher_fraction=1.0))
    frozen, path = n * n, 2 * n * r
    forward = 2 * (frozen + path)
    # To the inputs: everything in the second block, and the upper half of the first one's path.
    backward = frozen + path + n * r
    sgd = m * (forward + backward + 2 * path) + 2 * path
    tangents = 2 * path + 2 * (frozen + path)
    assert made.engine == "forward mode"
    assert sgd * made.cost["Fisher products"] == pytest.approx(2 * m * (forward + tangents))
    assert sgd * made.cost["validation"] == pytest.approx(m * forward / 5)


def operations(run: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


@pytest.mark.usefixtures("free_calls")
@pytest.mark.parametrize("network", ["adapters", "convolutions"])
def test_a_step_costs_what_torch_counts_in_it(network):
    """In a step without a refresh: torch does not count decompositions, nor fused attention."""
    torch.manual_seed(0)
    if network == "adapters":
        model: nn.Module = nn.Sequential(Adapted(24, 2), Adapted(24, 2), nn.Linear(24, 5))
        x = torch.randn(40, 24)
    else:
        build, examples = EXAMPLES[network]
        model, x = build(), examples()
    y, loss = torch.arange(len(x)) % 5, nn.CrossEntropyLoss()
    settings = {"intervals": Intervals(inverse_interval=1000), "damping": kronfac.FixedDamping(1.0)}
    made = plan(model, loss, x, **settings)
    optimizer = KFAC(model, loss, **settings)
    take_steps(optimizer, x, 4)
    sgd = operations(lambda: loss(model(x), y).backward())
    step = median(operations(lambda: take_steps(optimizer, x, 1)) for _ in range(5))
    assert step / sgd == pytest.approx(made.sgd_steps - made.cost["refreshes"], rel=0.02)


@pytest.mark.usefixtures("free_calls")
def test_fused_kernels_are_counted_as_the_products_in_them():
    """An LSTM's uses are seen: the columns of V, those of both biases among them."""
    m, steps, a, b = 6, 4, 5, 8
    model = nn.LSTM(a, b, batch_first=True)
    blocks = kronfac.Blocks(dense_limit=1)
    x, y = torch.randn(m, steps, a), torch.randn(m, steps, b)
    made = plan(Outputs(model), nn.MSELoss(), x, y, blocks=blocks)
    forward = kronfac.planning.FUSED * m * steps * 4 * b * (a + 1 + b + 1)
    sgd = 3 * forward + sum(row.count for row in made.rows)
    assert made.sgd_steps > made.cost["gradient"] == 1
    assert made.cost["validation"] == pytest.approx(forward / 5 / sgd)


class Outputs(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def test_calls_count_however_few_the_examples():
    """Steps of small networks on few examples cost more SGD steps: K-FAC makes more calls."""
    few, many = (plan_of(convolutions(), torch.randn(m, 3, 8, 8)).sgd_steps for m in (8, 8000))
    assert few > 1.5 * many


@pytest.mark.usefixtures("free_calls")
def test_fewer_examples_cost_less():
    x = torch.randn(1000, 20)
    whole = plan_of(perceptron(), x, intervals=Intervals(1.0, 1.0)).cost
    part = plan_of(perceptron(), x, intervals=Intervals(0.1, 0.5)).cost
    assert part["statistics"] == pytest.approx(whole["statistics"] / 10)
    assert part["Fisher products"] == pytest.approx(whole["Fisher products"] / 2)


# ------------------------------------------------------------------------------------------------ text


def test_the_text_has_every_unit_and_the_totals():
    made = plan_of(Transformer(), torch.randint(20, (30, 7)))
    text = str(made)
    for row in made.rows:
        assert row.name in text
        assert row.factors in text
    assert "Fisher products: forward mode, on 30 of 30 examples" in text
    assert f"State: {readable(made.state)}" in text
    assert f"A step costs {made.sgd_steps:.1f} SGD steps" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (99_960, "100 kB"), (2_500_000_000, "2.5 GB")],
)
def test_bytes_are_readable(count, text):
    assert readable(count) == text


@pytest.mark.parametrize("make", [perceptron, convolutions])
def test_no_graph_is_left_of_a_plan(make):
    def graphs() -> int:
        gc.collect()
        # By type: `isinstance` wakes up lazy objects that warn.
        found = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
        return sum(tensor.grad_fn is not None for tensor in found)

    before = graphs()
    x = torch.randn(8, 20) if make is perceptron else torch.randn(8, 3, 8, 8)
    plan(make(), nn.CrossEntropyLoss(), x)
    assert graphs() == before

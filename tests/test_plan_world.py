"""Plans for several processes: small ones by hand, closed forms, and one process is the plain plan."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kronfac
from kronfac import Plan, World, WorldPlan, plan
from kronfac.planning.limits import breaks_first, limits
from kronfac.planning.make_world import plan_world

SPEED = 2e9
INVERSES = ["block_diagonal", "block_tridiagonal"]
NETWORK = (20, 40, 30, 5)


def planned(inverse: str = "block_diagonal", examples: int = 600) -> Plan:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(NETWORK)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    x = torch.randn(examples, NETWORK[0])
    return plan(model, nn.CrossEntropyLoss(), x, inverse=inverse)


PLANS = {inverse: planned(inverse) for inverse in (*INVERSES, "ekfac")}
PLAIN = PLANS["block_diagonal"]
PARAMETERS = 40 * 21 + 30 * 41 + 5 * 31


def spread(processes: int, of: Plan = PLAIN, **settings: object) -> WorldPlan:
    return plan_world(of, World(processes, flops=SPEED, **settings))


# ---------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("inverse", PLANS)
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_one_process_is_the_plain_plan(inverse, wrapper):
    one = spread(1, PLANS[inverse], wrapper=wrapper)
    assert one.memory == PLANS[inverse].memory
    assert set(one.bytes.values()) == {0}
    assert set(one.communication.values()) == {0}
    assert one.share == one.examples == (600, *one.examples[1:])
    gradient = PLANS[inverse].work.gradient * 2 / SPEED
    for name, cost in PLANS[inverse].cost.items():
        assert one.computation[name] == pytest.approx(cost * gradient, rel=1e-12)
    assert one.balance == 1
    assert one.seconds == pytest.approx(PLANS[inverse].gradients * gradient)


def test_the_gradient_is_three_forward_passes():
    forward = 20 * 40 + 40 * 30 + 30 * 5
    assert 3 * forward * 600 <= PLAIN.work.gradient <= 3 * PARAMETERS * 600


# --------------------------------------------------------------------------------------------- by hand


def test_four_processes_by_hand():
    four = spread(4, bandwidth=1e6, latency=1e-3)
    factors = [(21, 40), (41, 30), (31, 5)]
    packed = 4 * sum(n * (n + 1) // 2 for pair in factors for n in pair)
    assert four.bytes["gradient"] == 2 * 4 * PARAMETERS * 3 / 4
    assert four.bytes["statistics"] == 2 * packed * 3 / 4
    # Two γ every 20 iterations.
    assert four.bytes["inverses"] == pytest.approx(2 * packed * 3 / 4 / 20)
    assert four.bytes["directions"] == 0
    assert four.bytes["control"] == 5 * 1000 * 3
    assert four.communication["statistics"] == pytest.approx(2 * packed * 0.75 / 1e6 + 6e-3)
    assert four.communication["control"] == pytest.approx(15e-3 + 15e-3)
    costs = [(a**3 + b**3) / 2 for a, b in factors]
    assert four.assignment == (1, 0, 2)
    assert four.balance == pytest.approx(max(costs) * 4 / sum(costs))
    assert four.share[0] == 150
    assert four.computation["gradient"] == pytest.approx(spread(1).computation["gradient"] / 4)
    # All are held by all.
    assert four.memory.state == PLAIN.memory.state


def test_inverses_are_held_by_a_share_of_the_processes():
    half, own = spread(4, inverse_share=0.5), spread(4, inverse_share=0.25)
    # Ranks 0 and 1 have the two larger ones, rank 2 the smallest.
    inverse = [4 * (a * a + b * b) for a, b in ((21, 40), (41, 30), (31, 5))]
    less = PLAIN.memory.state - sum(inverse)
    assert half.memory.state == less + inverse[0] + inverse[1]
    assert own.memory.state == less + max(inverse)
    assert half.bytes["directions"] == 4 * PARAMETERS / 2
    products = [row.product for row in PLAIN.rows]
    share = half.computation["preconditioning"] / spread(4).computation["preconditioning"]
    assert share == pytest.approx((products[0] + products[1]) / sum(products))


def test_the_units_of_a_chain_stay_together():
    assert len(set(spread(3, PLANS["block_tridiagonal"]).assignment)) == 1


def test_second_moments_in_the_eigenbasis_are_statistics_too():
    sent = [
        spread(2, PLANS[inverse]).bytes["statistics"] for inverse in ("block_diagonal", "ekfac")
    ]
    assert sent[1] - sent[0] == 4 * PARAMETERS


def test_the_bases_of_ekfac_are_lent_to_all_processes():
    own, all_hold = (spread(4, PLANS["ekfac"], inverse_share=share) for share in (0.25, 1.0))
    inverses = [4 * (a * a + b * b + a * b + a + b) for a, b in ((21, 40), (41, 30), (31, 5))]
    assert own.bytes["bases"] == sum(inverses) * 3 / 4
    assert all_hold.bytes["bases"] == 0
    # While statistics are taken a process has all of them.
    borrowed = own.memory.activations - all_hold.memory.activations
    assert borrowed == all_hold.memory.state - own.memory.state == sum(inverses) - max(inverses)


def test_what_torch_sends_counts_apart():
    plain, ddp, fsdp = (spread(4, wrapper=wrapper) for wrapper in ("none", "ddp", "fsdp"))
    assert ddp.bytes == plain.bytes
    assert plain.sent - ddp.sent == plain.bytes["gradient"]
    assert fsdp.sent == ddp.sent
    assert fsdp.bytes["parameters"] > 0
    assert fsdp.memory.parameters == math.ceil(PLAIN.memory.parameters / 4)


# ------------------------------------------------------------------------------------------ properties

PROCESSES = st.integers(1, 5000)


@given(PROCESSES, st.sampled_from(INVERSES))
def test_if_all_hold_everything_only_inverses_are_sent(W, inverse):
    found = spread(W, PLANS[inverse])
    total = sum(row.inverse_sent for row in PLANS[inverse].rows)
    assert found.bytes["directions"] == 0
    assert found.bytes["inverses"] == pytest.approx(2 / 20 * total * (W - 1) / W)


@given(PROCESSES, st.sampled_from(INVERSES))
def test_if_each_holds_its_own_only_directions_are_sent(W, inverse):
    found = spread(W, PLANS[inverse], inverse_share=1 / W)
    assert found.bytes["inverses"] == 0
    assert found.bytes["directions"] == pytest.approx(4 * PARAMETERS * (W - 1) / W)


@given(PROCESSES, st.floats(0.001, 1), st.sampled_from(["none", "fsdp"]))
def test_a_process_has_no_more_than_one_alone(W, share, wrapper):
    found, one = spread(W, inverse_share=share, wrapper=wrapper), spread(1)
    for name, seconds in one.computation.items():
        assert found.computation[name] <= seconds * (1 + 1e-12)
    assert found.memory.state <= one.memory.state + 3
    assert found.overlapped <= found.seconds <= 2 * found.overlapped * (1 + 1e-12)
    assert 1 - 1e-12 <= found.balance <= W * (1 + 1e-12)
    work = sum(row.inversion for row in PLAIN.rows)
    assert found.balance * work / W >= max(row.inversion for row in PLAIN.rows) * (1 - 1e-12)


@given(PROCESSES, st.floats(0.001, 1))
def test_groups_are_as_equal_as_can_be(W, share):
    world = World(W, inverse_share=share)
    sizes = [0] * world.groups
    for rank in range(W):
        sizes[world.group(rank)] += 1
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= max(1, round(share * W))


# ----------------------------------------------------------------------------------- what breaks first


def test_what_breaks_is_found():
    worlds = [spread(2**k, bandwidth=1e15, latency=0.0) for k in range(3)]
    assert [limit.processes for limit in limits(worlds)][:1] == [4]  # three units
    assert "refreshes" in breaks_first(worlds)
    slow = [spread(W, bandwidth=1.0) for W in (1, 2)]
    assert breaks_first(slow).startswith("First at 2 processes: communication")
    small = [spread(W, memory=1000.0) for W in (1, 2)]
    assert breaks_first(small).startswith("First at 1 process: memory")
    assert breaks_first(worlds[:1]) == "Nothing breaks up to 1 process."


def test_fewer_examples_than_processes():
    many = [spread(W, bandwidth=1e15, latency=0.0) for W in (1, 1000)]
    assert any("examples" in limit.text for limit in limits(many))
    assert many[1].share == (1, 1, 1)


# ------------------------------------------------------------------------------------------------ text


def test_kronfac_plan_takes_a_world():
    model = nn.Linear(20, 5)
    x = torch.randn(64, 20)
    found = plan(model, nn.CrossEntropyLoss(), x, world=World(8, flops=SPEED), bandwidth=1e9)
    assert found.world.world == World(8, bandwidth=1e9, flops=SPEED)
    assert "In 8 processes, a step takes" in str(found)
    assert str(found).startswith("K-FAC's plan for Linear")
    assert replace(found, world=None) == plan(model, nn.CrossEntropyLoss(), x)


def test_the_share_of_holders_is_that_of_the_optimizer():
    model, x = nn.Linear(20, 5), torch.randn(64, 20)
    settings = {"inverse_share": 0.25, "world": 4}
    for more in ({}, {"bandwidth": 1e9}):
        found = plan(model, nn.CrossEntropyLoss(), x, **settings, **more)
        assert found.world.world.inverse_share == 0.25
    found = plan(model, nn.CrossEntropyLoss(), x, inverse_share=0.25, world=World(4, flops=SPEED))
    assert found.world.world.inverse_share == 1  # what a World says counts


def test_the_speed_of_a_process_is_measured_if_it_is_not_given():
    found = plan(nn.Linear(20, 5), nn.CrossEntropyLoss(), torch.randn(64, 20), world=4)
    assert found.world.world.flops > 0
    meta = nn.Linear(20, 5, device="meta")
    with pytest.raises(ValueError, match="Say it"):
        plan(meta, nn.CrossEntropyLoss(), torch.randn(64, 20, device="meta"), world=4)


def test_the_mini_batch_of_all_processes_may_be_larger_than_the_example():
    whole = plan(
        nn.Linear(20, 5), nn.MSELoss(), torch.randn(4096, 20), world=World(64, flops=SPEED)
    )
    own = plan(
        nn.Linear(20, 5),
        nn.MSELoss(),
        torch.randn(64, 20),
        world=World(64, flops=SPEED, examples=4096),
    )
    assert own.world.examples == whole.world.examples
    assert own.world.memory == whole.world.memory
    for name, seconds in whole.world.computation.items():
        assert own.world.computation[name] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"processes": 0},
        {"bandwidth": 0.0},
        {"latency": -1.0},
        {"flops": math.inf},
        {"inverse_share": 0.0},
        {"wrapper": "horovod"},
        {"hops": "star"},
        {"micro_batch": 0},
        {"memory": -1.0},
    ],
)
def test_a_world_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="World needs"):
        World(**{"processes": 4, **wrong})


def test_a_bandwidth_needs_a_world():
    with pytest.raises(ValueError, match="no world"):
        kronfac.plan(nn.Linear(2, 1), nn.MSELoss(), torch.randn(8, 2), bandwidth=1e9)

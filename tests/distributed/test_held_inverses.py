"""A share of the ranks holds each inverse: the same steps, and less memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac import Plan
from kronfac.planning.plan import Row
from tests.distributed.held_cases import INTERVAL, INVERSES, KINDS, SHARES, name_of, planned
from tests.distributed.test_equal_steps import TOLERANCE, run

QUICK_KINDS = (
    "block_diagonal",
    "block_tridiagonal",
    "ekfac",
    "ekfac-ddp",
    "own",
    "lag",
    "convolutional",
)
UNEVEN = 5
"""Ranks in two groups, of three and of two, with a share of 0.4."""
MEASURED = 4


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    all_hold = [name_of(kind, 1.0) for kind in QUICK_KINDS]
    run(folder, all_hold, (1,))
    return run(folder, [*all_hold, *(name_of(kind, 0.5) for kind in QUICK_KINDS)], (2,))


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    run(folder, [name_of(kind, 1.0) for kind in KINDS], (1,))
    return run(folder, [name_of(kind, share) for kind in KINDS for share in SHARES], (2, 4))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"measured-{inverse}-{share}" for inverse in INVERSES for share in SHARES]
    return run(tmp_path_factory.mktemp("measured"), names, (MEASURED,))


def load(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    files = [folder / f"{name}-{size}-{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=True) for file in files]


def check(folder: Path, kind: str, shares: Sequence[float], sizes: Sequence[int]) -> None:
    (one,) = load(folder, name_of(kind, 1.0), 1)
    for size in sizes:
        all_hold = load(folder, name_of(kind, 1.0), size)[0]
        for share in shares:
            ranks = load(folder, name_of(kind, share), size)
            for other in ranks[1:]:
                assert torch.equal(other["parameters"], ranks[0]["parameters"])
                assert torch.equal(other["reports"], ranks[0]["reports"])
            theta, expected = ranks[0]["parameters"], one["parameters"]
            assert float((theta - expected).norm() / expected.norm()) <= TOLERANCE
            torch.testing.assert_close(ranks[0]["reports"], one["reports"], rtol=1e-8, atol=1e-12)
            # And the same products of the same numbers, wherever they are computed.
            if "ddp" not in kind:  # whose buckets differ from run to run
                assert torch.equal(theta, all_hold["parameters"])


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_steps_do_not_depend_on_who_holds_an_inverse(quick: Path, kind: str) -> None:
    check(quick, kind, (0.5,), (2,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_depend_on_who_holds_an_inverse_at_length(
    all_of_them: Path, kind: str
) -> None:
    check(all_of_them, kind, SHARES, (2, 4))


@pytest.mark.slow
def test_groups_need_not_be_equal(tmp_path: Path) -> None:
    run(tmp_path, [name_of("block_diagonal", 1.0)], (1,))
    run(tmp_path, ["held-uneven"], (UNEVEN,))
    (one,) = load(tmp_path, name_of("block_diagonal", 1.0), 1)
    ranks = load(tmp_path, "held-uneven", UNEVEN)
    theta, expected = ranks[0]["parameters"], one["parameters"]
    assert all(torch.equal(rank["parameters"], theta) for rank in ranks)
    assert float((theta - expected).norm() / expected.norm()) <= TOLERANCE


# ------------------------------------------------------------------------------------ memory and bytes


def held_by(plan: Plan, rank: int) -> list[Row]:
    """The units whose inverses a rank is to hold."""
    assert plan.world is not None
    world = plan.world.world
    pairs = zip(plan.rows, plan.world.assignment, strict=True)
    return [row for row, owner in pairs if world.group(owner) == world.group(rank)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_a_rank_holds_the_inverses_of_its_group_and_no_more(
    measured: Path, inverse: str, share: float
) -> None:
    plan = planned(MEASURED, share, inverse)
    found = load(measured, f"measured-{inverse}-{share}", MEASURED)
    expected = [sum(row.inverse for row in held_by(plan, rank)) for rank in range(MEASURED)]
    assert [rank["held"] for rank in found] == expected
    whole = sum(row.inverse for row in plan.rows)
    assert sum(expected) == whole * max(1, round(share * MEASURED))
    if inverse != "block_tridiagonal":  # which is one chain
        assert max(expected) == whole if share == 1 else max(expected) < whole


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_bytes_are_those_of_the_plan(measured: Path, inverse: str, share: float) -> None:
    """What travels in a broadcast between k ranks is what each of them sends, times k/(k − 1)."""
    plan = planned(MEASURED, share, inverse)
    assert plan.world is not None
    names = [f"measured-{inverse}-{which}" for which in (share, 1.0)]
    found, all_hold = (load(measured, name, MEASURED) for name in names)
    groups = plan.world.world.groups
    size = MEASURED // groups
    sent = plan.world.bytes
    passed = []
    for rank in range(MEASURED):
        plain, refreshing = _plain_and_refreshing(found[rank]["travelled"])
        least, _ = _plain_and_refreshing(all_hold[rank]["travelled"])
        every_step = sent["directions"] + sent.get("bases", 0.0)
        assert (plain - least) * (groups - 1) == pytest.approx(every_step * groups)
        own = sum(row.inverse_sent for row in held_by(plan, rank))
        assert refreshing - plain == (own if size > 1 else 0)
        passed.append((refreshing - plain) * (size - 1) / size)
    assert max(passed) == pytest.approx(sent["inverses"] * INTERVAL)


def _plain_and_refreshing(travelled: Tensor) -> tuple[int, int]:
    """Bytes of the last step without and of the last one with a refresh."""
    return int(travelled[-2]), int(travelled[-1])

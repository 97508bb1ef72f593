"""Bytes that live, and what they would be for more examples."""

import torch

from kronfac.planning.live_bytes import LiveBytes, peak_for


def test_storages_count_from_their_making_to_their_end():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a.view(10, 10).mul_(2)  # no memory of its own
        assert live.held == 400
        c = b + 1
        assert live.held == 800
        del c
        assert live.held == 400
    del a, b
    assert live.held == 0
    assert max(live.course) == 800


def test_every_point_grows_by_itself():
    courses = [(n, [1000, 100 * n]) for n in (4, 8)]  # the first is higher on few examples
    assert peak_for(8, courses) == 1000
    assert peak_for(64, courses) == 6400
    assert peak_for(8, [(8, [5, 7]), (8, [5, 7])]) == 7

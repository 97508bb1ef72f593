"""Buffers and random numbers after K-FAC's own passes."""

import pytest
import torch
from torch import nn

from kronfac.model import Buffers
from kronfac.model.side_effects import RandomState, replay
from tests.conftest import normal


class Counter(nn.Module):
    """One buffer that is written to, one that is replaced, one that is only read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().clone()
        return x * self.scale


def noted(model) -> Buffers:
    """Buffers after a pass that showed which of them are written to."""
    buffers = Buffers(model)
    kept = buffers.before_call("")
    model(normal(2, 3, dtype=torch.float32))
    buffers.after_call("", kept)
    return buffers


def test_buffers_that_passes_write_to_are_put_back():
    model = nn.Sequential(nn.Identity(), Counter())
    buffers = noted(model)
    counter, last = model[1], model[1].last
    with buffers.preserved():
        model(normal(2, 3, seed=1, dtype=torch.float32))
        assert int(counter.calls) == 2
    assert int(counter.calls) == 1
    assert counter.last is last
    assert torch.equal(last, normal(2, 3, dtype=torch.float32))


def test_also_if_the_pass_fails():
    model = Counter()
    buffers = noted(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), buffers.preserved():
        nn.Sequential(model, nn.Linear(4, 1))(normal(2, 3, dtype=torch.float32))
    assert int(model.calls) == 1


def test_replay_draws_what_was_drawn_and_puts_the_generator_back():
    state = RandomState.current(torch.device("cpu"))
    drawn = torch.rand(3)
    assert not state.same_as(RandomState.current(torch.device("cpu")))
    after = torch.get_rng_state()
    for _ in range(2):
        with replay(state):
            assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(torch.get_rng_state(), after)
    with replay(None):
        assert torch.equal(torch.get_rng_state(), after)

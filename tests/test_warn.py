"""Warnings point at the user's own line."""

import warnings
from pathlib import Path

import torch
from torch import nn

from kronfac import KFAC


def test_a_warning_from_inside_a_step_points_at_the_line_that_called_step():
    model = nn.Linear(3, 2)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss_fn)
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    (loss_fn(model(x), y) + model.weight.square().sum()).backward()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        optimizer.step()
    (unseen,) = given
    assert "a penalty" in str(unseen.message)
    assert Path(unseen.filename) == Path(__file__)


def test_a_warning_of_the_constructor_points_at_it():
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        KFAC(nn.Linear(3, 2), nn.CrossEntropyLoss(), lr=1e-3)
    assert [Path(warning.filename) for warning in given] == [Path(__file__)]

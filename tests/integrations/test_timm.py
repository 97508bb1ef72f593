"""timm: K-FAC with timm's groups and schedulers."""

import importlib

import pytest
from torch import nn

from kronfac import KFAC
from kronfac.integrations.timm import create_optimizer
from tests.integrations import problem
from tests.networks import libraries


def test_it_has_timms_groups_and_trains():
    libraries.timm()
    model, loss_fn = problem.network(), nn.CrossEntropyLoss()
    optimizer = create_optimizer(model, loss_fn, weight_decay=1e-4)
    assert isinstance(optimizer, KFAC)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 1e-4]
    assert {group["lr"] for group in optimizer.param_groups} == {1.0}
    for _ in range(problem.EPOCHS):
        for x, y in problem.loader():
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    assert problem.loss_of(model) < problem.REACHED


@pytest.mark.slow
def test_a_network_and_a_scheduler_of_timms():
    timm = libraries.timm()
    schedules = importlib.import_module("timm.scheduler")
    model = timm.create_model("resnet10t", num_classes=3, in_chans=1, drop_rate=0.0)
    x, y = problem.data(24)
    images = x.float()[:, :2].repeat_interleave(512, dim=1).reshape(24, 1, 32, 32)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = create_optimizer(model, loss_fn)
    scheduler, _ = schedules.create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=8, warmup_epochs=2, warmup_lr=0.1
    )
    losses = []
    for epoch in range(8):
        optimizer.zero_grad()
        loss = loss_fn(model(images), y)
        loss.backward()
        optimizer.step()
        scheduler.step(epoch + 1)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]

"""Training libraries take it as any optimizer of torch's: the steps of a plain loop."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kronfac import WhitenedMomentum
from kronfac.integrations.skorch import KFACMixin
from kronfac.integrations.timm import create_optimizer
from tests.integrations import language, problem
from tests.networks import libraries

RATE = {"lr": 0.03}


def plain() -> nn.Sequential:
    model = problem.network()
    optimizer = WhitenedMomentum(model, **RATE)
    for _ in range(problem.EPOCHS):
        for x, y in problem.loader():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def test_a_plain_loop_and_a_closure_train():
    model = problem.network()
    optimizer = WhitenedMomentum(model, **RATE)
    for _ in range(problem.EPOCHS):
        for x, y in problem.loader():

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), torch.Tensor)
    problem.assert_same(model, plain())
    assert problem.loss_of(model) < 0.5


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*logging interval")
def test_lightning():
    libraries.import_torchvision()
    lightning: Any = pytest.importorskip("lightning.pytorch")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = problem.network()

        def training_step(self, batch, index):
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return WhitenedMomentum(self, **RATE)

    module = Classifier()
    lightning.Trainer(
        max_epochs=problem.EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, problem.loader())  # fmt: skip
    problem.assert_same(module.model, plain())
    assert module.optimizers().optimizer.report.methods["polar"] == ["model.0.weight"]


def test_hugging_face(tmp_path):
    pytest.importorskip("accelerate")
    model, other = language.model(), language.model()
    args = libraries.transformers().TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=language.BATCH, num_train_epochs=2,
        train_sampling_strategy="sequential", logging_strategy="no", save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.0,
    )  # fmt: skip
    optimizer = WhitenedMomentum(model)
    trainer = libraries.transformers().Trainer(
        model, args, train_dataset=language.rows(), data_collator=language.collate,
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    by_hand = WhitenedMomentum(other)
    schedule = libraries.transformers().get_linear_schedule_with_warmup(by_hand, 0, 8)
    for batch in language.batches() * 2:
        targets = batch["labels"][:, 1:].ne(-100).sum()
        other(**batch, num_items_in_batch=targets).loss.backward()
        by_hand.step()
        schedule.step()
        by_hand.zero_grad()
    language.assert_same(model, other)
    assert optimizer.report.methods["polar"] == [
        "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_proj.weight",
    ]  # fmt: skip
    assert optimizer.state[model.transformer.h[0].attn.c_attn.weight]["treatment"][2:] == (1, 1, 3)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = problem.network()
    own = WhitenedMomentum(model, **RATE)
    prepared, optimizer, loader = accelerator.prepare(model, own, problem.loader())
    for _ in range(problem.EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(prepared(x), y))
            optimizer.step()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    problem.assert_same(model, plain())


def test_timm():
    libraries.timm()
    schedules = importlib.import_module("timm.scheduler")
    model = problem.network()
    optimizer = create_optimizer(model, weight_decay=0.1, **RATE)
    assert isinstance(optimizer, WhitenedMomentum)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]
    scheduler, _ = schedules.create_scheduler_v2(optimizer, sched="cosine", num_epochs=8)
    for epoch in range(problem.EPOCHS):
        for x, y in problem.loader():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step(epoch + 1)
    assert problem.loss_of(model) < 0.8


def test_skorch():
    skorch: Any = pytest.importorskip("skorch")

    class Net(KFACMixin, skorch.NeuralNetClassifier):
        pass

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = problem.network()

        def forward(self, x):
            return self.layers(x)

    x, y = problem.data()
    net = Net(
        Module, criterion=nn.CrossEntropyLoss, optimizer=WhitenedMomentum, max_epochs=10,
        batch_size=64, train_split=None, verbose=0, optimizer__weight_decay=0.0, **RATE,
    )  # fmt: skip
    net.fit(x, y)
    assert isinstance(net.optimizer_, WhitenedMomentum)
    assert problem.loss_of(net.module_.layers) < 0.5

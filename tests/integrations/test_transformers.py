"""K-FAC in the Trainer of transformers: the steps of a plain loop, checkpoints, half precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kronfac import KFAC
from kronfac.integrations.transformers import decay_groups, trainer_optimizer
from tests.integrations.language import assert_same, batches, collate, model, rows
from tests.networks.libraries import transformers

pytest.importorskip("accelerate")


def trainer(
    network: nn.Module,
    folder: Path,
    eta: float = 0.0,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    defaults = {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "linear",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = transformers().TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    return transformers().Trainer(
        network,
        args,
        train_dataset=rows(),
        eval_dataset=rows(16),
        data_collator=collate,
        optimizer_cls_and_kwargs=trainer_optimizer(weight_decay=eta, **(settings or {})),
    )


def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path):
    """With micro-batches, warm-up from a rate of 0, the Trainer's clipping and weight decay."""
    one, other = model(), model()
    run = trainer(
        one, tmp_path, 1e-3, gradient_accumulation_steps=2, warmup_steps=1, num_train_epochs=2
    )
    run.train()

    optimizer = KFAC(other, nn.CrossEntropyLoss(), params=decay_groups(other, 1e-3))
    schedule = transformers().get_linear_schedule_with_warmup(optimizer, 1, 4)
    for _ in range(2):
        for pair in (batches()[:2], batches()[2:]):
            targets = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in pair)
            for batch in pair:
                other(**batch, num_items_in_batch=targets).loss.backward()
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert_same(one, other)
    assert run.optimizer.optimizer.report.loss == pytest.approx(optimizer.report.loss, rel=1e-6)


def test_weight_decay_is_of_the_parameters_that_the_trainer_decays(tmp_path):
    network = model()
    decayed, rest = decay_groups(network, 0.1)
    names = set(trainer(network, tmp_path).get_decay_parameter_names(network))
    expected = {id(p) for name, p in network.named_parameters() if name in names}
    assert {id(p) for p in decayed["params"]} == expected
    assert len(rest["params"]) == len(list(network.parameters())) - len(expected) > 0
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def test_a_checkpoint_is_continued_to_the_bit(tmp_path):
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 2}
    one, other = model(), model()
    trainer(one, tmp_path, 1e-3, **options).train()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    trainer(other, tmp_path, 1e-3, **options).train(str(tmp_path / "checkpoint-3"))
    assert_same(one, other, 0.0)


def test_half_precision(tmp_path):
    network = model()
    run = trainer(network, tmp_path, bf16=True, num_train_epochs=5)
    run.train()
    assert all(p.dtype == torch.float32 for p in network.parameters())
    assert run.optimizer.optimizer.report.loss < 2.0

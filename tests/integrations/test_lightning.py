"""Lightning: automatic optimisation, accumulation, clipping, checkpoints."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.errors import LoopError
from kronfac.integrations.lightning import half_precision
from tests.integrations import problem
from tests.networks import libraries

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:.*logging interval"
)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def lightning() -> Any:
    libraries.import_torchvision()
    return pytest.importorskip("lightning.pytorch")


def classifier(lightning: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A module as users write it."""

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.network().to(dtype)
            self.loss_fn = nn.CrossEntropyLoss()
            self.examples: list[int] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            loss: Tensor = self.loss_fn(self.model(x), y)
            return loss

        def on_train_batch_end(self, *given: Any) -> None:
            report = self.optimizers().optimizer.report
            self.examples.append(0 if report is None else report.examples)

        def configure_optimizers(self) -> KFAC:
            return KFAC(self.model, self.loss_fn)

    return Classifier()


def test_it_takes_the_steps_of_a_plain_loop_and_trains(lightning):
    module = classifier(lightning)
    lightning.Trainer(max_epochs=problem.EPOCHS, **QUIET).fit(module, problem.loader())
    problem.assert_same(module.model, problem.train(closure=True))
    assert problem.loss_of(module.model) < problem.REACHED


def test_accumulated_micro_batches_are_one_mini_batch(lightning):
    module = classifier(lightning)
    trainer = lightning.Trainer(max_epochs=problem.EPOCHS, accumulate_grad_batches=4, **QUIET)
    trainer.fit(module, problem.loader(batch_size=16))
    assert module.examples[3] == 64
    problem.assert_same(module.model, problem.train(closure=False))


def test_a_functional_loss_with_accumulated_gradients_is_told_with_what_can_be_done(lightning):
    """Lightning's user writes no closure."""
    module = classifier(lightning)
    module.training_step = lambda batch, batch_idx: nn.functional.cross_entropy(
        module.model(batch[0]), batch[1]
    )
    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET)
    with pytest.raises(LoopError, match="Call the same object, not a function") as caught:
        trainer.fit(module, problem.loader(batch_size=32))
    assert "Lightning passes one unless it accumulates gradients." in str(caught.value)


def test_gradients_are_clipped_in_half_precision(lightning):
    refused = lightning.Trainer(
        max_epochs=1,
        gradient_clip_val=0.1,
        plugins=[lightning.plugins.MixedPrecision("16-mixed", "cpu")],
        **QUIET,
    )
    with pytest.raises(RuntimeError, match="performs unscaling of gradients internally"):
        refused.fit(classifier(lightning, torch.float32), problem.loader(dtype=torch.float32))
    module = classifier(lightning, torch.float32)
    plugin = half_precision("cpu")
    lightning.Trainer(max_epochs=12, gradient_clip_val=0.1, plugins=[plugin], **QUIET).fit(
        module, problem.loader(dtype=torch.float32)
    )
    assert problem.loss_of(module.model) < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [True, False])
def test_half_precision_trains(lightning, plugin):
    module = classifier(lightning, torch.float32)
    kind = half_precision if plugin else lambda d: lightning.plugins.MixedPrecision("16-mixed", d)
    lightning.Trainer(max_epochs=8, plugins=[kind("cpu")], **QUIET).fit(
        module, problem.loader(dtype=torch.float32)
    )
    assert problem.loss_of(module.model) < problem.REACHED


@pytest.mark.slow
def test_a_run_is_resumed_from_a_checkpoint(lightning, tmp_path):
    module = classifier(lightning)
    trainer = lightning.Trainer(max_epochs=3, **QUIET)
    trainer.fit(module, problem.loader())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = classifier(lightning)
    lightning.Trainer(max_epochs=problem.EPOCHS, **QUIET).fit(
        resumed, problem.loader(), ckpt_path=str(tmp_path / "run.ckpt")
    )
    problem.assert_same(resumed.model, problem.train(closure=True))

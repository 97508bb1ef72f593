"""A small GPT-2 learns to count, in the Trainer of Hugging Face: needs transformers and accelerate."""

import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kronfac.integrations.transformers import trainer_optimizer

TOKENS, LENGTH = 17, 10


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Numbers modulo 17 that go up by 1, 2 or 3."""
    start, by = torch.randint(TOKENS, (count, 1)), torch.randint(1, 4, (count, 1))
    ids = (start + by * torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": row, "labels": row} for row in ids]


def main(epochs: int = 20, examples: int = 256) -> float:
    """The loss on sequences that were not trained on."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=64,
            num_train_epochs=epochs,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=sequences(examples),
            eval_dataset=sequences(64),
            optimizer_cls_and_kwargs=trainer_optimizer(weight_decay=1e-4),
        )
        trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
    print(f"loss on new sequences: {loss:.3f}")
    return loss


if __name__ == "__main__":
    main()

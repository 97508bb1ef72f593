"""Heads and embeddings of a large vocabulary: nothing as large as its square is ever made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kronfac import KFAC

VOCABULARY, WIDTH, EXAMPLES = 50_000, 8, 4


class Largest(TorchDispatchMode):
    """Sees how large the tensors are that operations make."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


class Head(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


@pytest.mark.parametrize("tied", [False, True])
def test_no_tensor_is_larger_than_a_few_gradients(tied):
    model = Head(tied)
    x, y = (torch.randint(VOCABULARY, (EXAMPLES,)) for _ in range(2))
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    with Largest() as largest:
        losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert VOCABULARY * WIDTH <= largest.numel <= 2 * VOCABULARY * WIDTH

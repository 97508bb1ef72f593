"""What K-FAC can't train is refused when it is made: the parameter, the rule and the remedy."""

import pytest
import torch
from torch import nn

from kronfac import KFAC
from kronfac.errors import UnsupportedModelError


def words_model(**options) -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, **options), nn.Flatten(), nn.Linear(12, 2))


REFUSED = {
    "sparse gradients": (
        lambda: words_model(sparse=True),
        r"'0' \(Embedding\).*sparse=True.*Make it with sparse=False",
    ),
    "sparse gradients of bags": (
        lambda: nn.Sequential(nn.EmbeddingBag(6, 3, sparse=True), nn.Linear(3, 2)),
        r"'0' \(EmbeddingBag\).*sparse=True.*Make it with sparse=False",
    ),
    "gradients by frequency": (
        lambda: words_model(scale_grad_by_freq=True),
        r"'0' \(Embedding\).*scale_grad_by_freq=True.*Make it without",
    ),
    "complex numbers": (
        lambda: nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64)),
        r"real parameters in float32 or float64; got '0' \(torch.complex64\)",
    ),
    "half precision": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.float16)),
        r"got '1' \(torch.float16\).*call it inside torch.autocast",
    ),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16)),
        r"got '0' \(torch.bfloat16\).*call it inside torch.autocast",
    ),
    "no parameters": (lambda: nn.Sequential(nn.Tanh()), "found no trainable parameter"),
    "nothing to train": (
        lambda: nn.Sequential(nn.Linear(3, 2)).requires_grad_(False),
        "found no trainable parameter in Sequential",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_when_the_optimizer_is_made(name):
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        KFAC(make(), nn.MSELoss())


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_a_frozen_embedding_may_be_of_any_kind(options):
    model = words_model(**options)
    model[0].weight.requires_grad_(False)
    optimizer, x = KFAC(model, nn.MSELoss()), torch.randint(6, (8, 4))
    before = model[2].weight.detach().clone()
    optimizer.step(optimizer.closure(x, torch.randn(8, 2)))
    assert not torch.equal(model[2].weight, before)


class Own(nn.Module):
    """A table of the user's own, which no adapter describes."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.options = nn.Parameter(torch.randn(6, 3)), options

    def forward(self, x):
        return nn.functional.embedding(x, self.table, **self.options)


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_a_users_own_lookup_is_refused_when_it_is_seen(options):
    model = nn.Sequential(Own(**options), nn.Flatten(), nn.Linear(12, 2))
    optimizer, x = KFAC(model, nn.MSELoss()), torch.randint(6, (8, 4))
    (name,) = options
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=name):
        optimizer.step(optimizer.closure(x, torch.randn(8, 2)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

"""Seeded runs of the everyday optimizer end where they did: no change of structure may move them.

python -m tests.everyday.test_recorded      records them anew
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import InputFactors

RECORDED = Path(__file__).parent / "recorded.json"
STEPS = 30
TOKENS = 11


class Perceptron(nn.Sequential):
    """Dense layers, some of equal shape."""

    def __init__(self) -> None:
        layers = [
            nn.Flatten(),
            *(layer for n in (9, 24, 24) for layer in (nn.Linear(n, 24), nn.Tanh())),
        ]
        super().__init__(*layers, nn.Linear(24, TOKENS))


class Images(nn.Sequential):
    """Convolutions: plain, grouped and transposed, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1, groups=2), nn.ReLU(),
            nn.ConvTranspose2d(12, 6, 2, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(216, 12), nn.ReLU(), nn.Linear(12, TOKENS),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = super().forward(x.unflatten(1, (1, 3)))
        return z


class Language(nn.Module):
    """Attention with packed queries, keys and values, or an LSTM; the head is tied to the embedding."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.table, self.norm = nn.Embedding(TOKENS, 16), nn.LayerNorm(16)
        if recurrent:
            self.cell = nn.LSTM(16, 16, batch_first=True)
        else:
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x.flatten(1) > 0).long().cumsum(1))
        if self.recurrent:
            x = self.cell(x)[0]
        else:
            q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
            x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.linear(self.norm(x), self.table.weight).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron, "images": Images, "attention": Language,
    "recurrent": lambda: Language(True),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"steps": STEPS},
    "polar": {"method": "polar", "inputs": InputFactors(interval=3, rows=10)},
    "whitened": {"method": "whitened", "inputs": InputFactors(interval=4)},
    "without": {"inputs": None},
}
RUNS = [(model, name) for model in MODELS for name in SETTINGS]


def run(model_name: str, name: str) -> dict[str, Any]:
    """Losses, methods, and the parameters at the end in a few numbers."""
    torch.manual_seed(7)
    model = MODELS[model_name]().double()
    optimizer = WhitenedMomentum(model, 0.02, **SETTINGS[name])
    losses = []
    for _ in range(STEPS):
        x = torch.randn(32, 3, 3).double()
        loss = functional.cross_entropy(model(x), (x.sum((1, 2)).abs() * 2).long() % TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    generator = torch.Generator().manual_seed(2)
    ends = {}
    for key, p in model.named_parameters():
        flat = p.detach().flatten()
        vector = torch.randn(p.numel(), generator=generator, dtype=p.dtype) / p.numel() ** 0.5
        ends[key] = [float(flat.norm()), float(vector @ flat)]
    return {"losses": losses[::5], "methods": optimizer.report.methods, "ends": ends}


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_a_run_ends_where_it_did(model: str, name: str) -> None:
    expected, found = json.loads(RECORDED.read_text())[f"{model}/{name}"], run(model, name)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-8)
    assert found["methods"] == expected["methods"]
    for key, (norm, product) in expected["ends"].items():
        assert found["ends"][key] == pytest.approx([norm, product], rel=1e-8, abs=1e-8 * norm)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = [f" {json.dumps('/'.join(key))}: {json.dumps(run(*key))}" for key in RUNS]
    RECORDED.write_text("{\n" + ",\n".join(runs) + "\n}\n")

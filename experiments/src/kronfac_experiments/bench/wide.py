"""`kronfac bench wide`: how good a block with a diagonal or low-rank side is for a language-model head.

A small model of the next word is trained on synthetic text with Zipf's frequencies. Then the quadratic
model of its head's weight V (vocabulary, width + 1) alone,

    M(δ) = gᵀδ + ½ δᵀ(F + λI)δ,

is minimised as far as a block allows: along δ = −P g for the block's damped inverse P, with the best
length. Shown is which share of the smallest possible M that is. F is the exact Fisher of the head.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from kronfac.curvature import DiagonalBlock, FactoredTikhonov, KroneckerBlock, Tap
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described
from kronfac_experiments.pages.publish import publish

DAMPINGS = (0.1, 0.001)
"""λ in units of the mean curvature, tr F / dim F."""
GAMMAS = (0.3, 1.0, 3.0, 10.0)
"""γ in units of √λ; the best of them counts."""
FOLLOWING = 20
"""Words that often follow a word."""
Inverse = Callable[[Tensor, float], Tensor]
"""From the gradient and γ to P g."""


@dataclass(frozen=True)
class WideConfig(BenchOptions):
    """How good a block with a diagonal or low-rank side is for a language-model head."""

    threads: int = 1
    """CPU threads."""
    vocabulary: int = 2000
    """Words."""
    width: int = 64
    """Features that the head sees, beside the ones of its bias."""
    steps: int = 1500
    """Training steps of Adam."""
    examples: int = 1000
    """Words that gradient, Fisher and statistics are of."""
    ranks: tuple[int, ...] = (16, 64)
    """Ranks of low-rank plus diagonal sides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"vocabulary": self.vocabulary, "width": self.width, "ranks": self.ranks}
        at_least(1, steps=self.steps, examples=self.examples, **sizes)


@dataclass(frozen=True)
class WideTrial:
    """The shares that every block reaches at one λ."""

    name: str
    shares: dict[str, float]


def wide_command(config: WideConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    settings = asdict(config) | {"ranks": list(config.ranks)}  # as JSON has it
    for name in ("run_dir", "output"):
        del settings[name]
    path = config.folder("wide") / "wide.json"
    jobs = {str(damping): partial(_measure, config, damping) for damping in DAMPINGS}
    trials = run_trials(path, settings, WideTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


class Text:
    """Words with Zipf's frequencies; four in five follow from the one before."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
        self._frequencies = frequencies / frequencies.sum()
        self._following = self._words(vocabulary * FOLLOWING).view(vocabulary, FOLLOWING)
        self._odds = torch.rand(vocabulary, FOLLOWING, generator=self._generator) ** 3

    def _words(self, count: int) -> Tensor:
        return torch.multinomial(self._frequencies, count, True, generator=self._generator)

    def pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """Words, and the words after them."""
        first, other = self._words(count), self._words(count)
        choice = torch.multinomial(self._odds[first], 1, generator=self._generator).squeeze(1)
        often = torch.rand(count, generator=self._generator) < 0.8
        return first, torch.where(often, self._following[first, choice], other)


@dataclass(frozen=True)
class Head:
    """What the quadratic model of the head is made of."""

    inputs: Tensor  # ā (examples, width + 1)
    probabilities: Tensor  # (examples, vocabulary)
    gradient: Tensor  # (vocabulary, width + 1)
    sampled: Tap
    """Gradients at the outputs for targets that are drawn from the model."""

    def fisher(self, V: Tensor) -> Tensor:
        """F V, with F = mean of (diag p − p pᵀ) ⊗ ā āᵀ."""
        z = self.probabilities * (self.inputs @ V.mT)
        z = z - self.probabilities * z.sum(dim=1, keepdim=True)
        return z.mT @ self.inputs / len(z)

    @cached_property
    def diagonal(self) -> Tensor:
        """The diagonal of F, (vocabulary, width + 1)."""
        p = self.probabilities
        return (p - p.square()).mT @ self.inputs.square() / len(p)

    def smallest(self, damping: float) -> float:
        """−M at its minimum, by preconditioned conjugate gradients."""
        g, scale = self.gradient, self.diagonal + damping
        x, r = torch.zeros_like(g), g.clone()
        z = r / scale
        q, rz = z, (r * z).sum()
        first = rz
        while rz > 1e-8 * first:
            product = self.fisher(q) + damping * q
            alpha = rz / (q * product).sum()
            x, r = x + alpha * q, r - alpha * product
            z = r / scale
            before, rz = rz, (r * z).sum()
            q = z + rz / before * q
        return float((g * x).sum()) / 2

    def decrease(self, direction: Tensor, damping: float) -> float:
        """−M at its minimum along a direction."""
        slope = float((self.gradient * direction).sum())
        product = self.fisher(direction) + damping * direction
        return slope**2 / (2 * float((direction * product).sum()))


def train_head(config: WideConfig) -> Head:
    """A trained model's head."""
    torch.manual_seed(config.seed)
    text = Text(config.vocabulary, config.seed)
    model = nn.Sequential(
        nn.Embedding(config.vocabulary, config.width),
        nn.Linear(config.width, config.width),
        nn.GELU(),
        nn.Linear(config.width, config.vocabulary),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(config.steps):
        x, y = text.pairs(256)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = text.pairs(config.examples)
    model.double()
    with torch.no_grad():
        features = model[:-1](x)
        p = model[-1](features).softmax(dim=1)
    a = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)

    def at_outputs(targets: Tensor) -> Tensor:
        g: Tensor = p - functional.one_hot(targets, config.vocabulary)
        return g

    drawn = torch.multinomial(p, 1).squeeze(1)
    tap = Tap(a.unsqueeze(1), at_outputs(drawn).unsqueeze(1))
    return Head(a, p, at_outputs(y).mT @ a / len(a), tap)


def _measure(config: WideConfig, damping: float, advance: Advance) -> WideTrial:
    head = train_head(config)
    lambda_ = damping * float(head.diagonal.mean())
    best = head.smallest(lambda_)
    advance(0.7)
    shares = {}
    for name, inverse in _inverses(config, head).items():
        directions = [inverse(head.gradient, scale * math.sqrt(lambda_)) for scale in GAMMAS]
        shares[name] = max(head.decrease(d, lambda_) for d in directions) / best
    advance(0.3)
    return WideTrial(str(damping), shares)


def _inverses(config: WideConfig, head: Head) -> dict[str, Inverse]:
    weight = 1 / len(head.inputs)
    blocks = {
        "A ⊗ G": KroneckerBlock(),
        "A ⊗ diagonal of G": KroneckerBlock(diagonal_grads=True),
        "diagonal": DiagonalBlock(),
    }
    moments = {name: block.observe([head.sampled], 1.0, weight) for name, block in blocks.items()}

    def of(name: str, V: Tensor, gamma: float) -> Tensor:
        return moments[name].damped(gamma, FactoredTikhonov()).mv(V)

    inverses: dict[str, Inverse] = {name: partial(of, name) for name in moments}
    full = KroneckerBlock().observe([head.sampled], 1.0, weight)
    values, vectors = torch.linalg.eigh(full.G)
    for rank in config.ranks:
        s, U = values[-rank:], vectors[:, -rank:]
        low = (U * s) @ U.mT
        G = low + torch.diag((full.G.diagonal() - low.diagonal()).clamp(min=0))
        inverses[f"A ⊗ (rank {rank} + diagonal) of G"] = partial(_kronecker, full.A, G)
    return inverses


def _kronecker(A: Tensor, G: Tensor, V: Tensor, gamma: float) -> Tensor:
    """(G + γ/π I)⁻¹ V (A + πγI)⁻¹."""
    damped_A, damped_G = FactoredTikhonov().damp(A, G, gamma)
    left: Tensor = torch.linalg.solve(damped_G, V)
    both: Tensor = torch.linalg.solve(damped_A, left.mT)
    return both.mT


def _document(config: WideConfig, trials: list[WideTrial]) -> Document:
    names = list(trials[0].shares)
    rows = [(name, *(f"{trial.shares[name]:.3f}" for trial in trials)) for name in names]
    columns = ("block", *(f"λ = {trial.name} of the mean curvature" for trial in trials))
    note = (
        "Share of the largest possible decrease of the quadratic model that the block's direction reaches, "
        f"with the best length and the best of γ = {', '.join(f'{x:g}' for x in GAMMAS)} times √λ. "
        "Statistics from targets drawn once per example, as SampledFisher has them; all of it in float64."
    )
    return Document(
        title="Wide sides",
        command=command_line("bench wide", config),
        settings=described(
            config.threads,
            config.seed,
            f"vocabulary {config.vocabulary}, width {config.width}, {config.examples} examples after "
            f"{config.steps} steps of Adam",
        ),
        tables=(Table("One block alone", columns, rows, note),),
        plots=(),
    )

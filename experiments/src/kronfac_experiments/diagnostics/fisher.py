"""The exact Fisher of a perceptron, dense: F = E[(ā ⊗ g) (ā ⊗ g)ᵀ] [MG15 §3].

For an example x the model's own distribution over y enters only through E_y[g gᵀ] = Jᵀ F_R J, J = ∂f/∂s.
With F_R = Σ_k r_k r_kᵀ (`Likelihood.fisher_root_columns`) it is Σ_k g⁽ᵏ⁾ g⁽ᵏ⁾ᵀ for g⁽ᵏ⁾ = Jᵀ r_k: one
backward pass for each output, and no sampling. The expectation over x is the mean over the examples.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kronfac.linalg import symmetrize
from kronfac.objective import Likelihood
from kronfac_experiments.diagnostics.block_matrix import BlockMatrix, filled

WORK_SPACE = 2**23
"""Numbers that the products of a chunk of examples may take: 64 MB, which is more than the caches."""


@dataclass(frozen=True)
class LayerExamples:
    """Some examples, as one layer sees them."""

    a: Tensor  # (examples, in+1)
    g: Tensor  # (outputs, examples, out): Σ over the first dimension is E_y


class Examples:
    """ā and g of some layers of a perceptron, in chunks, in float64: cumulants are small differences.

    Args:
        model: Linear layers and elementwise functions; a copy is evaluated.
        likelihood: Of its outputs.
        x: (examples, inputs).
        layers: Names of layers that follow each other; None for all of them.
        chunk: Examples at a time; None for what takes some 64 MB.
    """

    def __init__(
        self,
        model: nn.Sequential,
        likelihood: Likelihood,
        x: Tensor,
        layers: Sequence[str] | None = None,
        chunk: int | None = None,
    ) -> None:
        self._model = copy.deepcopy(model).double()
        self._likelihood, self._x = likelihood, x.double()
        linear = {n: m for n, m in self._model.named_children() if isinstance(m, nn.Linear)}
        self.names = tuple(linear if layers is None else layers)
        self.shapes = [
            (linear[n].out_features, linear[n].in_features + (linear[n].bias is not None))
            for n in self.names
        ]
        self.count = len(x)
        outs, ins = zip(*self.shapes, strict=True)
        outputs = [*linear.values()][-1].out_features
        an_example = sum(ins) + outputs * sum(outs) + max(ins) ** 2 + max(outs) ** 2
        self._chunk = chunk or max(1, WORK_SPACE // an_example)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Weights of every layer."""
        return tuple(d_out * d_in for d_out, d_in in self.shapes)

    def __iter__(self) -> Iterator[list[LayerExamples]]:
        for x in self._x.split(self._chunk):
            inputs, sums, z = self._forward(x)
            columns = self._likelihood.fisher_root_columns(z.detach())
            passes = [torch.autograd.grad(z, sums, column, retain_graph=True) for column in columns]
            gradients = map(torch.stack, zip(*passes, strict=True))
            yield [LayerExamples(a, g) for a, g in zip(inputs, gradients, strict=True)]

    @torch.no_grad()
    def mean_inputs(self) -> list[Tensor]:
        """E[ā] of every layer, (in+1,)."""
        chunks = [self._forward(x)[0] for x in self._x.split(self._chunk)]
        return [
            sum(a.sum(dim=0) for a in layer) / self.count for layer in zip(*chunks, strict=True)
        ]

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """ā and s of every layer, and the outputs."""
        inputs, sums = {}, {}
        for name, module in self._model.named_children():
            before, x = x, module(x)
            if name in self.names:
                has_bias = module.bias is not None
                ones = before.new_ones(len(before), int(has_bias))
                inputs[name], sums[name] = torch.cat([before.detach(), ones], dim=1), x
        return [inputs[name] for name in self.names], [sums[name] for name in self.names], x


def add(sums: dict[tuple[int, int], Tensor], pair: tuple[int, int], term: Tensor) -> None:
    """Add a new tensor to the sum of a pair of layers."""
    if pair in sums:
        sums[pair].add_(term)
    else:
        sums[pair] = term


def exact_fisher(examples: Examples) -> BlockMatrix:
    """F over the weights of the layers, in float64."""
    return fourth_moments(examples)


def fourth_moments(examples: Examples, means: Sequence[Tensor] | None = None) -> BlockMatrix:
    """E[ā⁽¹⁾ ā⁽²⁾ g⁽¹⁾ g⁽²⁾] for all pairs of weights, with ā less `means` if these are given."""
    pairs = [(i, j) for j in range(len(examples.names)) for i in range(j + 1)]
    sums: dict[tuple[int, int], Tensor] = {}
    for chunk in examples:
        a = [c.a if means is None else c.a - means[i] for i, c in enumerate(chunk)]
        for i, j in pairs:
            A = torch.einsum("cp,cq->cpq", a[i], a[j]).flatten(1)
            add(sums, (i, j), A.mT @ summed_products(chunk[i].g, chunk[j].g))

    def block(i: int, j: int) -> Tensor:
        if i > j:
            return block(j, i).mT
        (out, in_), (out_, in__) = examples.shapes[i], examples.shapes[j]
        # (in · in', out · out') to (in · out, in' · out'), the layout of ā ⊗ g = vec(g āᵀ).
        moments = (sums[i, j] / examples.count).view(in_, in__, out, out_)
        moments = moments.permute(0, 2, 1, 3).reshape(in_ * out, in__ * out_)
        return symmetrize(moments) if i == j else moments

    return filled(examples.names, examples.sizes, block, like=sums[0, 0])


def summed_products(g: Tensor, h: Tensor) -> Tensor:
    """E_y[g hᵀ] = Σ_k g⁽ᵏ⁾ h⁽ᵏ⁾ᵀ of every example, flattened: (examples, out · out')."""
    return torch.einsum("kcp,kcq->cpq", g, h).flatten(1)

"""Derivatives of recurrent layers through time: from gradients at their states to those at their products.

With s = W_ih x + b_ih, q = W_hh h₋ + b_hh at all time steps, σ = sigmoid(s + q), h₋ and c₋ one step before:

- RNN:   h = f(s + q)
- LSTM:  c = σ_f c₋ + σ_i tanh(s_g + q_g),  u = σ_o tanh c,  h = u or W_hr u
- GRU:   n = tanh(s_n + σ_r q_n),  h = (1 − σ_z) n + σ_z h₋

The slopes of all gates are computed at once; what is left to do step by step, from the last to the first,
is a product with W_hh and a few with slopes. Layouts: (time, batch, features), gates side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

Grads = tuple[Tensor | None, ...]
Pull = Callable[[Sequence[Tensor | None]], Grads]
"""From the gradients at the states to those at s, q, W_hr u and the first states."""


@dataclass(frozen=True)
class Products:
    """What a recurrent layer multiplied in one direction, at all time steps."""

    kind: "Kind"
    s: Tensor
    """W_ih x + b_ih."""
    q: Tensor
    """W_hh h₋ + b_hh."""
    before: Tensor
    """h₋ without a graph."""
    W_hh: Tensor
    project: Callable[[Tensor], Tensor] | None = None
    """u ↦ W_hr u."""
    W_hr: Tensor | None = None


class Kind(Protocol):
    """A kind of recurrent layer."""

    def step(self, s: Tensor, q: Tensor, *states: Tensor) -> Any:
        """The states after one time step, by torch's own derivatives."""
        ...

    def states(
        self, products: Products, h: Tensor, start: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None, Pull]:
        """All states (h first), u if there is a projection, and their derivatives; no graph."""
        ...


class _States(Function):
    """States that are known, as a function of the products that they depend on."""

    @staticmethod
    def forward(ctx: Any, found: list[Tensor], pull: Pull, *inputs: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.pull = pull
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.pull(grads)


def states(products: Products, h: Tensor, start: Sequence[Tensor]) -> Sequence[Tensor]:
    """The states of all time steps with their graph: h as given, and the cells of an LSTM."""
    detached = Products(
        products.kind,
        products.s.detach(),
        products.q.detach(),
        products.before,
        products.W_hh,
        products.project,
        products.W_hr,
    )
    found, u, pull = products.kind.states(detached, h, [x.detach() for x in start])
    projected = None if products.project is None or u is None else products.project(u)
    node: Any = _States
    result: Sequence[Tensor] = node.apply(found, pull, products.s, products.q, projected, *start)
    return result


@dataclass(frozen=True)
class Plain:
    """An RNN with tanh or relu."""

    relu: bool

    def step(self, s: Tensor, q: Tensor, *states: Tensor) -> Tensor:
        """f(s + q)."""
        return torch.relu(s + q) if self.relu else torch.tanh(s + q)

    def states(
        self, products: Products, h: Tensor, start: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None, Pull]:
        """f′ from f."""
        slope = (h > 0).to(h.dtype) if self.relu else 1 - h.square()
        W = products.W_hh

        def pull(grads: Sequence[Tensor | None]) -> Grads:
            (at_h,) = grads
            assert at_h is not None
            g = torch.empty_like(slope)
            dh = at_h[-1]
            for t in reversed(range(len(g))):
                torch.mul(dh, slope[t], out=g[t])
                dh = torch.addmm(at_h[t - 1], g[t], W) if t else g[0] @ W
            return g, g, None, dh

        return [h], None, pull


@dataclass(frozen=True)
class LSTM:
    """Gates in the order i, f, g, o."""

    def step(self, s: Tensor, q: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """(h, c)."""
        _, c = states
        i, f, g, o = (s + q).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def states(
        self, products: Products, h: Tensor, start: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None, Pull]:
        """Cells are computed step by step, all else at once; the slopes in the place of s + q."""
        slopes = (products.s + products.q).unflatten(-1, (4, -1))
        i, f, o = (slopes[..., n, :].sigmoid() for n in (0, 1, 3))
        g = slopes[..., 2, :].tanh()
        added = i * g
        cells, before = torch.empty_like(f), start[1]
        for t in range(len(f)):
            before = torch.addcmul(added[t], f[t], before, out=cells[t])
        squashed = cells.tanh()
        u = o * squashed
        # ∂c and, for o, ∂u / ∂(s + q), by σ′ = σ (1 − σ) and tanh′ = 1 − tanh².
        torch.addcmul(added, added, i, value=-1, out=slopes[..., 0, :])
        kept = f * torch.cat([start[1].unsqueeze(0), cells[:-1]])
        torch.addcmul(kept, kept, f, value=-1, out=slopes[..., 1, :])
        torch.addcmul(i, added, g, value=-1, out=slopes[..., 2, :])
        torch.addcmul(u, u, o, value=-1, out=slopes[..., 3, :])
        through = torch.addcmul(o, u, squashed, value=-1)  # ∂u/∂c
        W, W_hr = products.W_hh, products.W_hr

        def pull(grads: Sequence[Tensor | None]) -> Grads:
            at_h, at_c = grads
            g = torch.empty_like(slopes)
            at_product = None if W_hr is None else h.new_empty(h.shape)
            dh = torch.zeros_like(h[0]) if at_h is None else at_h[-1]
            dc = torch.zeros_like(f[0])
            for t in reversed(range(len(g))):
                if at_product is not None and W_hr is not None:
                    at_product[t] = dh
                    dh = dh @ W_hr
                dc = torch.addcmul(dc, dh, through[t])
                dc = dc if at_c is None else dc + at_c[t]
                torch.mul(dc.unsqueeze(1), slopes[t, :, :3], out=g[t, :, :3])
                torch.mul(dh, slopes[t, :, 3], out=g[t, :, 3])
                dc = dc * f[t]
                flat = g[t].flatten(1)
                dh = torch.addmm(at_h[t - 1], flat, W) if t and at_h is not None else flat @ W
            joined = g.flatten(2)
            return joined, joined, at_product, dh, dc

        return [h, cells], u, pull


@dataclass(frozen=True)
class GRU:
    """Gates in the order r, z, n."""

    def step(self, s: Tensor, q: Tensor, *states: Tensor) -> Tensor:
        """(1 − z) n + z h₋."""
        (h,) = states
        (s_r, s_z, s_n), (q_r, q_z, q_n) = s.chunk(3, dim=-1), q.chunk(3, dim=-1)
        z = torch.sigmoid(s_z + q_z)
        n = torch.tanh(s_n + torch.sigmoid(s_r + q_r) * q_n)
        return n + z * (h - n)

    def states(
        self, products: Products, h: Tensor, start: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None, Pull]:
        """All at once: h₋ is known."""
        (s_r, s_z, s_n), (q_r, q_z, q_n) = (x.chunk(3, dim=-1) for x in (products.s, products.q))
        r, z = torch.sigmoid(s_r + q_r), torch.sigmoid(s_z + q_z)
        n = torch.addcmul(s_n, r, q_n).tanh_()
        slopes = torch.empty_like(products.q).unflatten(-1, (3, -1))  # ∂h/∂q
        free = 1 - z
        at_n = torch.addcmul(free, free, n * n, value=-1)  # ∂h/∂s_n
        torch.mul(at_n, r, out=slopes[..., 2, :])
        at_r = slopes[..., 2, :] * q_n
        torch.addcmul(at_r, at_r, r, value=-1, out=slopes[..., 0, :])
        at_z = products.before.sub(n).mul_(z)
        torch.addcmul(at_z, at_z, z, value=-1, out=slopes[..., 1, :])
        W = products.W_hh

        def pull(grads: Sequence[Tensor | None]) -> Grads:
            (at_h,) = grads
            assert at_h is not None
            at_q, all_h = torch.empty_like(slopes), torch.empty_like(h)
            dh = at_h[-1]
            for t in reversed(range(len(h))):
                all_h[t] = dh
                torch.mul(dh.unsqueeze(1), slopes[t], out=at_q[t])
                flat = at_q[t].flatten(1)
                carried = torch.addmm(at_h[t - 1], flat, W) if t else flat @ W
                dh = carried.addcmul_(dh, z[t])
            joined = at_q.flatten(2)
            at_s = torch.cat([joined[..., : -h.shape[-1]], all_h * at_n], dim=-1)
            return at_s, joined, None, dh

        return [h], None, pull


LAYER_FUNCTIONS: tuple[Any, ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
CELL_FUNCTIONS: tuple[Any, ...] = (
    torch.lstm_cell,
    torch.gru_cell,
    torch.rnn_tanh_cell,
    torch.rnn_relu_cell,
)
_KINDS: tuple[Kind, ...] = (LSTM(), GRU(), Plain(relu=False), Plain(relu=True))
KINDS: dict[Any, Kind] = dict(zip(LAYER_FUNCTIONS, _KINDS, strict=True))
"""By torch's functions of whole layers."""
CELLS: dict[Any, Kind] = dict(zip(CELL_FUNCTIONS, _KINDS, strict=True))
"""By those of single steps."""

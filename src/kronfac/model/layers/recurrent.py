"""nn.LSTM, nn.GRU, nn.RNN: every layer and direction has V = [W_ih b_ih] and [W_hh b_hh].

Torch computes the states, one layer at a time. From them the products of all time steps are computed again,
at once: W_ih x + b_ih, W_hh h₋ + b_hh, and W_hr u if an LSTM has a projection, with h₋ the states one step
before, taken as constants. They go into a node of the graph whose outputs are torch's states and whose
derivatives are those through time (`through_time.py`). So each matrix has one use, with time steps as
places, and its gradient is that of the whole recurrence. Tensors are (time, batch, features): examples are
dimension 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.functions import Function, SeeFunctions, observes
from kronfac.model.layers.through_time import CELLS, KINDS, Kind, Products, states
from kronfac.model.registry import Layer, register
from kronfac.model.uses import Layout


@dataclass(frozen=True)
class Times:
    """Sequences as (time, batch, features), those of different lengths with zeros after them."""

    counts: Tensor | None = (
        None  # (time, batch), whether a sequence goes on; None if all are as long
    )
    batch_sizes: Tensor | None = None

    @classmethod
    def packed(cls, batch_sizes: Tensor, device: torch.device) -> "Times":
        """The times of sequences that are ordered by length, by how many go on at every time."""
        numbers = torch.arange(int(batch_sizes[0]))
        return cls((numbers < batch_sizes.unsqueeze(1)).to(device), batch_sizes)

    def padded(self, data: Tensor) -> Tensor:
        """(time, batch, features) from what torch has: the same, or (all times, features)."""
        if self.counts is None:
            return data
        empty = data.new_zeros(self.counts.numel(), data.shape[-1])
        return empty.index_copy(0, self._places, data).view(*self.counts.shape, -1)

    def data(self, x: Tensor) -> Tensor:
        """The reverse."""
        return x if self.counts is None else x.flatten(0, 1).index_select(0, self._places)

    def backwards(self, x: Tensor) -> Tensor:
        """Every sequence from its end to its beginning, which is its own reverse."""
        if self.counts is None:
            return x.flip(0)
        time = torch.arange(len(x), device=x.device).unsqueeze(1)
        index = torch.where(self.counts, self.counts.sum(dim=0) - 1 - time, time)
        return x.gather(0, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def last(self, x: Tensor) -> Tensor:
        """What every sequence has at its end, (batch, features)."""
        if self.counts is None:
            return x[-1]
        return x[self.counts.sum(dim=0) - 1, torch.arange(x.shape[1], device=x.device)]

    @property
    def _places(self) -> Tensor:
        assert self.counts is not None
        return self.counts.flatten().nonzero().squeeze(1)


@dataclass(frozen=True)
class Matrices:
    """The parameters of one direction of one layer."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None

    @classmethod
    def of(cls, flat: Sequence[Tensor], bias: bool) -> "Matrices":
        """In torch's order."""
        b_ih, b_hh = flat[2:4] if bias else (None, None)
        rest = flat[4:] if bias else flat[2:]
        return cls(flat[0], flat[1], b_ih, b_hh, rest[0] if rest else None)


def _recurrent(function: Function, kind: Kind, see: SeeFunctions, *args: Any) -> tuple[Tensor, ...]:
    """What `function` computes: (input, states, parameters, …), or (data, batch sizes, states, …)."""
    packed = isinstance(args[3], (list, tuple))
    data, given = args[0], args[2 if packed else 1]
    flat, bias, layers, dropout, training, both = args[3:9] if packed else args[2:8]
    first = not packed and args[8]
    start = list(given) if isinstance(given, (list, tuple)) else [given]
    see.give_up_inputs(function, data, *start)
    data = data.transpose(0, 1) if first else data
    times = Times.packed(args[1], data.device) if packed else Times()
    directions = 2 if both else 1
    each = len(flat) // (layers * directions)
    ends: list[list[Tensor]] = [[] for _ in start]
    for layer in range(layers):
        some = slice(layer * directions, (layer + 1) * directions)
        weights = flat[some.start * each : some.stop * each]
        parts = [Matrices.of(weights[d * each : (d + 1) * each], bias) for d in range(directions)]
        h = [x[some] for x in start]
        with torch.no_grad():
            # Of parameters that are theirs alone, which K-FAC has in the graph only in the products.
            front = (data,) if times.batch_sizes is None else (data, times.batch_sizes)
            state = tuple(h) if len(h) > 1 else h[0]
            options = (bias, 1, 0.0, training, both)
            back = options if packed else (*options, False)
            found = times.padded(function(*front, state, weights, *back)[0])
        data, last = _layer(see, function, kind, times, times.padded(data), h, found, parts)
        for found_so_far, x in zip(ends, last, strict=True):
            found_so_far.extend(x)
        data = times.data(data)
        if dropout and training and layer < layers - 1:
            data = functional.dropout(data, dropout)
    outputs = data.transpose(0, 1) if first else data
    return outputs, *(torch.stack(x) for x in ends)


def _layer(
    see: SeeFunctions,
    function: Function,
    kind: Kind,
    times: Times,
    x: Tensor,
    start: Sequence[Tensor],
    found: Tensor,
    parts: Sequence[Matrices],
) -> tuple[Tensor, list[list[Tensor]]]:
    """The outputs of one layer with their graph, and its last states, for every direction.

    Args:
        see: what records uses.
        function: torch's.
        kind: its derivatives.
        times: which time steps there are.
        x: the inputs, (time, batch, features).
        start: the first states, (directions, batch, features) each.
        found: the outputs as torch computes them, (time, batch, directions · features).
        parts: the parameters of every direction.
    """
    outputs, ends = [], []
    # No views, which may not be outputs of a node: what follows may write to them.
    each = [found] if len(parts) == 1 else [x.contiguous() for x in found.chunk(2, dim=-1)]
    for d, (own, matrices) in enumerate(zip(each, parts, strict=True)):
        turn = times.backwards if d else _same
        begin = [h[d] for h in start]
        inputs = turn(x).contiguous()  # a product with a bias is faster that way
        products = _products(see, function, kind, times, inputs, begin[0], turn(own), matrices)
        h, *others = states(products, turn(own), begin)
        outputs.append(turn(h))
        ends.append([times.last(state) for state in (h, *others)])
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return joined, [list(pair) for pair in zip(*ends, strict=True)]


def _same(x: Tensor) -> Tensor:
    return x


def _products(
    see: SeeFunctions,
    function: Function,
    kind: Kind,
    times: Times,
    x: Tensor,
    h0: Tensor,
    h: Tensor,
    matrices: Matrices,
) -> Products:
    """The products of all time steps, seen; h are the states that torch has computed."""
    layout = Layout(dim=1, counts=times.counts)
    before = torch.cat([h0.detach().unsqueeze(0), h[:-1]])

    def product(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = functional.linear(a, weight, bias)
        see.product(outputs, weight, a, bias, function, layout)
        return outputs

    return Products(
        kind,
        product(x, matrices.ih, matrices.b_ih),
        product(before, matrices.hh, matrices.b_hh),
        before,
        matrices.hh.detach(),
        None if matrices.hr is None else partial(product, weight=matrices.hr, bias=None),
        None if matrices.hr is None else matrices.hr.detach(),
    )


def _cell(
    function: Function,
    kind: Kind,
    see: SeeFunctions,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """One time step, (batch, features)."""
    h, *others = hx if isinstance(hx, (list, tuple)) else [hx]
    see.give_up_inputs(function, input, h, *others)
    products = []
    for x, weight, bias in ((input, w_ih, b_ih), (h, w_hh, b_hh)):
        outputs = functional.linear(x, weight, bias)
        see.product(outputs, weight, x, bias, function, Layout(dim=0))
        products.append(outputs)
    return kind.step(products[0], products[1], h, *others)


for _function, _kind in KINDS.items():
    observes(_function)(partial(_recurrent, _function, _kind))
for _function, _kind in CELLS.items():
    observes(_function)(partial(_cell, _function, _kind))


class RecurrentAdapter(Layer):
    """Two matrices with their biases for every layer and direction, and perhaps a projection."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """By layer and direction."""
        assert isinstance(module, nn.RNNBase)
        found: list[tuple[str, ...]] = []
        for layer in range(module.num_layers):
            for direction in ("", "_reverse") if module.bidirectional else ("",):
                end = f"l{layer}{direction}"
                found += [(f"weight_{m}_{end}", f"bias_{m}_{end}") for m in ("ih", "hh")]
                found += [(f"weight_hr_{end}",)] if module.proj_size else []
        return found


class CellAdapter(Layer):
    """Two matrices with their biases."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """For inputs and states."""
        return [("weight_ih", "bias_ih"), ("weight_hh", "bias_hh")]


for _type in (nn.LSTM, nn.GRU, nn.RNN):
    register(_type, RecurrentAdapter(), subclasses=True)
for _cell_type in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    register(_cell_type, CellAdapter(), subclasses=True)

"""nn.LSTM, nn.GRU, nn.RNN: every layer and direction has V = [W_ih b_ih] and [W_hh b_hh].

Torch computes the states, one layer at a time. From these states, the products of all time steps are
computed again at once: s = W_ih x + b_ih and q = W_hh h₋ + b_hh, with the states h₋ one step before as
constants. Then the states are computed from s and q step by step, so that gradients flow through time. So
each matrix has one use, with time steps as places, and the gradient of the whole recurrence. With
σ = sigmoid:

- RNN:   h = f(s + q)
- LSTM:  c = σ_f c₋ + σ_i tanh(s_g + q_g),  h = σ_o tanh c
- GRU:   n = tanh(s_n + σ_r q_n),  h = (1 − σ_z) n + σ_z h₋

Tensors are (time, batch, features), with the gates side by side in the features: examples are dimension 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.model.functions import Function, SeeFunctions, observes
from kronfac.model.layout import Layout
from kronfac.model.registry import Layer, register

Step = Callable[..., tuple[Tensor, ...]]
"""From s and q of one time step and the states before it to the states after it, with h first."""


def _relu(s: Tensor, q: Tensor, h: Tensor) -> tuple[Tensor]:
    return (torch.relu(s + q),)


def _tanh(s: Tensor, q: Tensor, h: Tensor) -> tuple[Tensor]:
    return (torch.tanh(s + q),)


def _lstm(s: Tensor, q: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (s + q).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(s: Tensor, q: Tensor, h: Tensor) -> tuple[Tensor]:
    (s_r, s_z, s_n), (q_r, q_z, q_n) = s.chunk(3, dim=-1), q.chunk(3, dim=-1)
    z = torch.sigmoid(s_z + q_z)
    n = torch.tanh(s_n + torch.sigmoid(s_r + q_r) * q_n)
    return (n + z * (h - n),)


@dataclass(frozen=True)
class Times:
    """Sequences as (time, batch, features), with zeros after those that are shorter."""

    counts: Tensor | None = None
    """(time, batch), whether a sequence has this time; None if all are equally long."""
    batch_sizes: Tensor | None = None

    @classmethod
    def packed(cls, batch_sizes: Tensor, device: torch.device) -> "Times":
        """From the number of sequences at every time, for sequences ordered by length."""
        numbers = torch.arange(int(batch_sizes[0]))
        return cls((numbers < batch_sizes.unsqueeze(1)).to(device), batch_sizes)

    def padded(self, data: Tensor) -> Tensor:
        """(time, batch, features) from torch's layout, which is the same or (all times, features)."""
        if self.counts is None:
            return data
        return data.new_zeros(*self.counts.shape, data.shape[-1]).masked_scatter(
            self.counts.unsqueeze(-1), data
        )

    def data(self, x: Tensor) -> Tensor:
        """Torch's layout from (time, batch, features)."""
        return x if self.counts is None else x[self.counts]

    def backwards(self, x: Tensor) -> Tensor:
        """Every sequence from its end to its beginning."""
        if self.counts is None:
            return x.flip(0)
        time = torch.arange(len(x), device=x.device).unsqueeze(1)
        index = torch.where(self.counts, self.counts.sum(dim=0) - 1 - time, time)
        return x.gather(0, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _recurrent(function: Function, step: Step, see: SeeFunctions, *args: Any) -> tuple[Tensor, ...]:
    """Compute `function` of (input, states, parameters, …), or of (data, batch sizes, states, …)."""
    packed = isinstance(args[3], (list, tuple))
    data, given = args[0], args[2 if packed else 1]
    flat, bias, layers, dropout, training, both = args[3:9] if packed else args[2:8]
    first = not packed and args[8]
    start = list(given) if isinstance(given, (list, tuple)) else [given]
    see.give_up_inputs(function, data, *start)
    directions = 2 if both else 1
    each = len(flat) // (layers * directions)
    if each % 2:  # with W_hr, of proj_size
        see.give_up_inputs(function, *flat)
        found: tuple[Tensor, ...] = function(*args)
        return found
    data = data.transpose(0, 1) if first else data
    times = Times.packed(args[1], data.device) if packed else Times()
    ends: list[list[Tensor]] = [[] for _ in start]
    for layer in range(layers):
        some = slice(layer * directions, (layer + 1) * directions)
        weights = flat[some.start * each : some.stop * each]
        h = [x[some] for x in start]
        with torch.no_grad():
            front = (data,) if times.batch_sizes is None else (data, times.batch_sizes)
            state = tuple(h) if len(h) > 1 else h[0]
            options = (bias, 1, 0.0, training, both)
            back = options if packed else (*options, False)
            h_torch = times.padded(function(*front, state, weights, *back)[0])
        outputs, x = [], times.padded(data)
        for d, own in enumerate(h_torch.chunk(directions, dim=-1)):
            turn = times.backwards if d else _same
            parameters = weights[d * each : (d + 1) * each]
            begin = [state[d] for state in h]
            states, last = _direction(
                see, function, step, times.counts, turn(x), turn(own), begin, parameters
            )
            outputs.append(turn(states))
            for end, value in zip(ends, last, strict=True):
                end.append(value)
        data = times.data(outputs[0] if directions == 1 else torch.cat(outputs, dim=-1))
        if dropout and training and layer < layers - 1:
            data = functional.dropout(data, dropout)
    outputs_first = data.transpose(0, 1) if first else data
    return outputs_first, *(torch.stack(x) for x in ends)


def _same(x: Tensor) -> Tensor:
    return x


def _direction(
    see: SeeFunctions,
    function: Function,
    step: Step,
    counts: Tensor | None,
    x: Tensor,
    found: Tensor,
    begin: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor]]:
    """The outputs of one direction of a layer, with their graph, and its last states.

    Args:
        see: records the uses.
        function: torch's function.
        step: its equations.
        counts: which places count, see `Times`.
        x: the inputs.
        found: h as torch computes it.
        begin: the first states, (batch, features) each.
        parameters: W_ih, W_hh, and b_ih and b_hh if there are any.
    """
    W_ih, W_hh = parameters[:2]
    b_ih, b_hh = parameters[2:] or (None, None)
    before = torch.cat([begin[0].detach().unsqueeze(0), found[:-1]])

    def product(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = functional.linear(a, weight, bias)
        see.product(outputs, weight, a, bias, function, Layout(dim=1, counts=counts))
        return outputs

    # A product with a bias is faster for contiguous inputs.
    s, q = product(x.contiguous(), W_ih, b_ih), product(before, W_hh, b_hh)

    W = W_hh.detach().mT
    states, outputs = list(begin), []
    times = zip(s.unbind(), q.unbind(), before.unbind(), strict=True)
    for t, (s_t, q_t, h) in enumerate(times):
        # The addend is zero, with the derivative of q by h₋.
        new = step(s_t, torch.addmm(q_t, states[0] - h, W), *states)
        if counts is not None:  # the states of a sequence that has ended stay
            pairs = zip(new, states, strict=True)
            new = tuple(torch.where(counts[t].unsqueeze(-1), now, old) for now, old in pairs)
        states = list(new)
        outputs.append(states[0])
    return torch.stack(outputs), states


def _cell(
    function: Function,
    step: Step,
    see: SeeFunctions,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """One time step, (batch, features)."""
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    see.give_up_inputs(function, input, *states)
    products = []
    for x, weight, bias in ((input, w_ih, b_ih), (states[0], w_hh, b_hh)):
        outputs = functional.linear(x, weight, bias)
        see.product(outputs, weight, x, bias, function, Layout(dim=0))
        products.append(outputs)
    after = step(*products, *states)
    return after if len(after) > 1 else after[0]


STEPS: dict[Any, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
}
CELLS: dict[Any, Step] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}
for _function, _step in STEPS.items():
    observes(_function)(partial(_recurrent, _function, _step))
for _function, _step in CELLS.items():
    observes(_function)(partial(_cell, _function, _step))


class RecurrentAdapter(Layer):
    """Two matrices with their biases for every layer and direction; none are seen with `proj_size`."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """By layer and direction."""
        assert isinstance(module, nn.RNNBase)
        found: list[tuple[str, ...]] = []
        for layer in range(module.num_layers):
            for direction in ("", "_reverse") if module.bidirectional else ("",):
                end = f"l{layer}{direction}"
                found += [(f"weight_{m}_{end}", f"bias_{m}_{end}") for m in ("ih", "hh")]
        return found


class CellAdapter(Layer):
    """Two matrices with their biases."""

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """Two matrices: for inputs and for states."""
        return [("weight_ih", "bias_ih"), ("weight_hh", "bias_hh")]


for _type in (nn.LSTM, nn.GRU, nn.RNN):
    register(_type, RecurrentAdapter(), subclasses=True)
for _cell_type in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    register(_cell_type, CellAdapter(), subclasses=True)

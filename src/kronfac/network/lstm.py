"""An LSTM in plain operations: the kernels of oneDNN and cuDNN have no forward-mode derivative.

    i, f, g, o = W_ih x_t + b_ih + W_hh h + b_hh,   c ← σ(f) c + σ(i) tanh(g),   h ← W_hr σ(o) tanh(c)

Layout: packed sequences (steps of all of them, features), of which step t has `sizes[t]`, fewer and fewer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, h and c as `torch.lstm` gives them, for padded or packed sequences."""
    if isinstance(args[1], Tensor):
        data, sizes, *rest = args
        return _packed(data, sizes.tolist(), *rest)
    x, *rest, batch_first = args
    x = x.transpose(0, 1) if batch_first else x
    length, examples = x.shape[:2]
    packed, h, c = _packed(x.reshape(length * examples, -1), [examples] * length, *rest)
    outputs = packed.view(length, examples, -1)
    return outputs.transpose(0, 1) if batch_first else outputs, h, c


def _packed(
    data: Tensor,
    sizes: Sequence[int],
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = weights[k * each : (k + 1) * each]
            start = (hx[0][k], hx[1][k])
            out, end = _layer(data, sizes, start, own, has_biases, backwards=direction == 1)
            outputs.append(out)
            last.append(end)
        data = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
        if dropout and train and layer < layers - 1:
            data = functional.dropout(data, dropout)
    h, c = zip(*last, strict=True)
    return data, torch.stack(h), torch.stack(c)


def _layer(
    data: Tensor,
    sizes: Sequence[int],
    start: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The outputs of one layer in one direction, and h and c at the end of every sequence."""
    W_ih, W_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projected = len(weights) > (4 if has_biases else 2)
    inputs = functional.linear(data, W_ih, b_ih).split(list(sizes))
    order = range(len(sizes) - 1, -1, -1) if backwards else range(len(sizes))
    h, c = (state[: sizes[order[0]]] for state in start)
    outputs, ended = {}, []
    for t in order:
        n = sizes[t]
        if n < len(h):
            ended.append((h[n:], c[n:]))
            h, c = h[:n], c[:n]
        elif n > len(h):  # backwards, these begin here
            begin = slice(len(h), n)
            h, c = torch.cat([h, start[0][begin]]), torch.cat([c, start[1][begin]])
        i, f, g, o = (inputs[t] + functional.linear(h, W_hh, b_hh)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        if projected:
            h = functional.linear(h, rest[-1])
        outputs[t] = h
    ended.append((h, c))
    ends_h, ends_c = zip(*reversed(ended), strict=True)  # the longest come first
    return torch.cat([outputs[t] for t in range(len(sizes))]), (
        torch.cat(ends_h),
        torch.cat(ends_c),
    )

"""What a pass has held is free when the pass is: no graph waits for Python's collector."""

import gc
import weakref

import pytest
import torch

from kronfac.linearize import Traced
from tests.layers.architectures import KINDS
from tests.layers.problems import regression


@pytest.mark.parametrize("name", KINDS)
def test_a_graph_is_freed_with_its_view(name):
    problem = regression(KINDS[name].build(), KINDS[name].inputs())
    network, (part,) = problem.network, problem.batch.passes
    gc.collect()
    gc.disable()
    try:
        view = Traced(network, part)
        view.taps([torch.ones_like(z) for z in view.outputs])
        uses = weakref.ref(view._graph[2])
        del view
        assert uses() is None
    finally:
        gc.enable()

"""A mean loss is a mean: duplicating every example changes no factor."""

import pytest
import torch
from torch.testing import assert_close

from kronfac.model import Blocks
from kronfac.storage import tensors_in
from tests.conftest import AUTODIFF
from tests.layers.kinds import KINDS
from tests.layers.problems import classification, regression

# A layer that K-FAC does not understand yet has a diagonal block, which it says.

LIMITS = {
    "default": Blocks(),
    "no dense blocks": Blocks(dense_limit=0),
    "reduce": Blocks("reduce", 0),
}


@pytest.mark.parametrize("make", [regression, classification])
@pytest.mark.parametrize("blocks", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("name", KINDS)
def test_duplicated_examples_change_no_factor(name, blocks, make):
    model, x = KINDS[name].build()
    once, twice = (make(model, data, blocks=blocks) for data in (x, torch.cat([x, x])))
    pairs = zip(once.curvature().blocks, twice.curvature().blocks, strict=True)
    for unit, (one, two) in zip(once.network.units, pairs, strict=True):
        if not unit.observed:
            assert unit.why  # an estimate, with random signs
            continue
        for a, b in zip(tensors_in(one), tensors_in(two), strict=True):
            assert_close(a, b, **AUTODIFF)

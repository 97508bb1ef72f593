"""States that an earlier version saved load, and the run goes on as it would have."""

import pytest
import torch
from torch.testing import assert_close

from tests.optimizer.old_states import FOLDER, INVERSES, LAST, SAVED_AT, advance, new_run


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("version", [6])
def test_a_state_of_an_earlier_version_goes_on(version, inverse):
    saved = torch.load(FOLDER / f"state_version_{version}_{inverse}.pt", weights_only=True)
    optimizer = new_run(inverse)
    optimizer.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    advance(optimizer, range(SAVED_AT, LAST))
    assert_close(dict(optimizer.model.state_dict()), saved["last"], rtol=1e-8, atol=1e-10)

"""Values to plain containers and back."""

import io
from dataclasses import dataclass

import pytest
import torch

from kronfac.errors import StateError
from kronfac.storage import Storable, pack, tensors_in, unpack


@dataclass(frozen=True)
class Inner(Storable):
    matrix: torch.Tensor
    name: str


@dataclass(frozen=True)
class Outer(Storable):
    parts: tuple[Inner | None, ...]
    number: float
    table: dict[str, torch.Tensor]


def value() -> Outer:
    inner = Inner(torch.arange(4.0).reshape(2, 2), "a")
    return Outer((inner, None), 1.5, {"b": torch.ones(3)})


def test_a_value_comes_back_from_a_file_that_holds_no_code():
    file = io.BytesIO()
    torch.save(pack(value()), file)
    file.seek(0)
    found = unpack(torch.load(file, weights_only=True))
    assert isinstance(found, Outer)
    assert isinstance(found.parts[0], Inner)
    assert torch.equal(found.parts[0].matrix, value().parts[0].matrix)
    assert (found.parts[0].name, found.parts[1], found.number) == ("a", None, 1.5)
    assert torch.equal(found.table["b"], torch.ones(3))


def test_tensors_are_found_wherever_they_are():
    found = tensors_in([value(), (torch.zeros(1),), "text", None])
    assert [tuple(t.shape) for t in found] == [(2, 2), (3,), (1,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: packed | {"class": "Unheard"}, "'Unheard', which is not known"),
        (lambda packed: packed | {"more": 1}, r"not known here: \['more'\]"),
        (lambda packed: {k: v for k, v in packed.items() if k != "name"}, r"it has no \['name'\]"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message):
    packed = change(pack(value().parts[0]))
    with pytest.raises(StateError, match=message):
        unpack(packed)

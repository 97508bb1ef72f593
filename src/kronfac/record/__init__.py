"""The calls of the model and the loss in the user's code, as a batch of passes."""

from kronfac.record.batch import Batch, LossCall, ModelCall, Operation, Pass, Ref
from kronfac.record.closure import MiniBatchClosure
from kronfac.record.examples import sizes, subsets
from kronfac.record.mode import record
from kronfac.record.recorder import Recorder

__all__ = [
    "Batch",
    "LossCall",
    "MiniBatchClosure",
    "ModelCall",
    "Operation",
    "Pass",
    "Recorder",
    "Ref",
    "record",
    "sizes",
    "subsets",
]

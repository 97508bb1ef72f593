"""What surrounds the optimizer in the experiments of [MG15 §13], useful for any training loop."""

from kronfac.training.adaptive_batch import AdaptiveBatchSampler
from kronfac.training.averaging import averaged
from kronfac.training.batch_schedule import ExponentialBatchSize, ScheduledBatchSampler
from kronfac.training.initialization import sparse_

__all__ = [
    "AdaptiveBatchSampler",
    "ExponentialBatchSize",
    "ScheduledBatchSampler",
    "averaged",
    "sparse_",
]

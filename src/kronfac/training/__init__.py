"""What surrounds the optimizer in the experiments of [MG15 §13], useful for any training loop."""

from kronfac.training.averaging import averaged
from kronfac.training.batch_schedule import ExponentialBatchSize, ScheduledBatchSampler
from kronfac.training.initialization import sparse_

__all__ = ["ExponentialBatchSize", "ScheduledBatchSampler", "averaged", "sparse_"]

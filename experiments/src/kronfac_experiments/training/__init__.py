"""What surrounds the optimizer in the paper's experiments [MG15 §13]."""

from kronfac_experiments.training.averaging import averaged
from kronfac_experiments.training.batch_schedule import ExponentialBatchSize, ScheduledBatchSampler
from kronfac_experiments.training.initialization import sparse_

__all__ = ["ExponentialBatchSize", "ScheduledBatchSampler", "averaged", "sparse_"]

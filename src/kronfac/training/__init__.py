"""Mini-batches for a training loop."""

from kronfac.training.adaptive_batch import AdaptiveBatchSampler

__all__ = ["AdaptiveBatchSampler"]

"""Modes of an optimizer: in `eval` the model has the average of its iterates, in `train` the last of them.

The names are those that the Hugging Face Trainer and Accelerate call if an optimizer has them.
"""

from dataclasses import replace

import torch

from kronfac.errors import LoopError
from kronfac.interrupts import Waiting
from kronfac.iterate_average import IterateAverage
from kronfac.transitions import SteppingOptimizer
from kronfac.vector import Matrices


class AveragingOptimizer(SteppingOptimizer):
    """An optimizer that may keep the average of its iterates for evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average of the iterates into the model, for evaluation or to be saved.

        `train()` takes it out again, to the bit. Without `average_decay`, or before the first step, there
        is no average, and nothing is done.
        """
        state, decay = self._state, self.settings.average_decay
        average = state.average or IterateAverage()
        if decay is None or not state.iteration or average.aside is not None:
            return
        if self.network.shards is not None:
            self.network.shards.pull()
        theta = self.network.theta()
        self._exchange(
            average.joined_by(theta, decay), replace(average, aside=theta), back_to=theta
        )

    @torch.no_grad()
    def train(self) -> None:
        """Put the parameters that training goes on from back into the model, if `eval()` took them out."""
        average = self._state.average
        if average is None or average.aside is None:
            return
        if self.network.shards is not None:
            self.network.shards.pull()
        shown = self.network.theta()
        self._exchange(average.aside, replace(average, aside=None), back_to=shown)

    def _exchange(self, theta: Matrices, average: IterateAverage, back_to: Matrices) -> None:
        """Put other parameters into the model, all or none of them."""
        with Waiting():
            try:
                self.network.place(theta)
            except BaseException:
                self.network.place(back_to)
                raise
            self._state = replace(self._state, average=average)
            self._conditions.leave(self.network)

    def _refuse_in_eval(self) -> None:
        """Refuse a step from the average, which is not where training has come to.

        Raises:
            LoopError: the last call was that of `eval()`.
        """
        average = self._state.average
        if average is not None and average.aside is not None:
            raise LoopError(
                "KFAC takes no step after optimizer.eval(): the model has the average of its iterates, and "
                "training goes on from the last of them. Call optimizer.train() before the forward pass."
            )

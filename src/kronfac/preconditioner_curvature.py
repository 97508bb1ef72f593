"""Statistics and inverses of a preconditioner: those of `KFAC`, with a damping that is given."""

import math
import warnings
from dataclasses import replace
from typing import Any, Literal

from kronfac.control import Measurement
from kronfac.curvature_update import curvature_examples, update_curvature
from kronfac.distributed import ALONE, Holders, Phase, Ranks
from kronfac.divided_refresh import prepare_over_ranks
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError, RankError
from kronfac.evaluation import Evaluation
from kronfac.grad_scaler import Scaling
from kronfac.gradient_replacement import Schedule, finite, input_block, scheduled
from kronfac.groups import PerParameter
from kronfac.loop import evaluate_loop
from kronfac.network import Network, StandingRecorder, Unit
from kronfac.settings import Settings
from kronfac.spreading import spread_out
from kronfac.state import CurrentInverse, State
from kronfac.storage import tensors_in

Sides = Literal["both", "inputs"]


class EstimatingCurvature:
    """What has all that statistics and inverses need, and makes them; each state is a new one."""

    network: Network
    settings: Settings
    sides: Sides
    damping: Schedule
    steps: int
    _recorder: StandingRecorder
    _grad_scaler: Any
    _warned: set[str]
    _world: Ranks
    """The ranks, as of the step that is under way."""
    _wrapped: bool
    """Whether gradients are means of the ranks' means, as DistributedDataParallel makes them."""

    def _all_finite(self) -> bool:
        """Whether the gradients of all ranks are finite, which are at the same step."""
        own = [float(finite([p.grad for p in self.network.parameters])), float(self.steps)]
        rows = self._world.gather(Phase.GRADIENT, own)
        if len({row[1] for row in rows}) > 1:
            raise RankError(
                "The ranks have taken different numbers of steps of their Preconditioner: "
                f"{', '.join(str(int(row[1])) for row in rows)}. Load the same state on all ranks, and "
                "call step() equally often."
            )
        return all(row[0] for row in rows)

    def _agree(self) -> None:
        """Wait until all ranks have preconditioned gradients: none replaces its own before."""
        self._world.gather(Phase.COMMIT, [])

    def _evaluate(self, iteration: int) -> Evaluation | None:
        """The mini-batch since the last step, as part of that of all ranks."""
        return spread_out(
            self._world,
            self._evaluate_own,
            iteration=iteration,
            wrapped=self._wrapped,
            sums=False,
        )[0]

    def _evaluate_own(self) -> Evaluation | None:
        """The same of this rank, its loss as it was before a GradScaler scaled it."""
        evaluation = evaluate_loop(
            self._recorder,
            self.network,
            weight_decay=PerParameter(0.0),
            inverse=self.settings.inverse,
            scaling=Scaling(),
            who="Preconditioner",
        )
        if evaluation is None or self._grad_scaler is None:
            return evaluation
        scaler = self._grad_scaler
        scale = float(scaler() if callable(scaler) else scaler.get_scale())
        return replace(evaluation, batch=evaluation.batch.scaled(1 / scale))

    def _units(self, network: Network) -> list[Unit]:
        """The units with the blocks that are estimated."""
        if self.sides == "both":
            return list(network.units)
        return [replace(unit, block=input_block(unit)) for unit in network.units]

    def _with_statistics(self, evaluation: Evaluation, state: State) -> State:
        """The state with this mini-batch in its moving averages; as it was if they would not be finite."""
        self.network = evaluation.network
        network = replace(evaluation.network, units=self._units(evaluation.network))
        evaluation = replace(evaluation, network=network)
        m = Measurement(iteration=state.iteration + 1, examples=evaluation.examples)
        with network.buffers.preserved():
            some = curvature_examples(self.settings, evaluation, m)
            later, current, generator = update_curvature(self.settings, evaluation, some, state, m)
        curvature = later.value
        if not finite([number for block in curvature.blocks for number in block.probe()]):
            self._warn(
                "statistics",
                "The statistics of a mini-batch are not finite: Preconditioner.step() has left them out. "
                "Look for infinite inputs or activations.",
            )
            return state
        return replace(
            state,
            iteration=m.iteration,
            curvature=curvature,
            current=current,
            generator=generator,
        )

    def _with_inverse(self, state: State) -> State:
        """The state with a new inverse; the last good one stays where there is none."""
        damping, current = scheduled("damping", self.damping, self.steps), state.current
        if state.curvature is None:
            return state
        if current and (current.iteration, current.lambda_) == (state.iteration, damping):
            return state  # there is nothing new to invert
        old = None if state.current is None else state.current.inverse
        failure = ""
        try:
            # If there is a matrix to invert at all: units may all be left as they are.
            world = self._world if tensors_in(state.curvature) else ALONE
            holders = Holders.of(world, 1.0)
            prepared = prepare_over_ranks(self.settings.inverse, state.curvature, holders)
            made = prepared.damped(math.sqrt(damping))
            failure = "; ".join(message for _, message in made.failures)
            inverse = made.completed_by(old)
        except (NonFiniteError, NotPositiveDefiniteError) as error:
            inverse, failure = old, str(error)
        if failure:
            what = "gradients stay as they are" if inverse is None else "the last one stays in use"
            self._warn("inverse", f"There is no inverse: {failure} {what}. Raise the damping.")
        if inverse is None:
            return state
        return replace(state, current=CurrentInverse(inverse, state.iteration, damping))

    def _warn(self, kind: str, message: str) -> None:
        """Warn once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, UserWarning, stacklevel=5)

"""Is what K-FAC sees of the closure what the closure differentiates?

Compared now and then (`gradient_comparison.py`). A common factor is a scale: the terms get it. Single
parameters whose uses are not all seen get a diagonal block. Whatever is found is told once.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from kronfac.evaluation import Evaluation, in_full_precision
from kronfac.gradient_comparison import MIXED_TOLERANCE, compare, losses_agree
from kronfac.gradient_memory import GradientMemory, Verdict
from kronfac.groups import PerParameter
from kronfac.warn import warn

INTERVAL = 100
"""Iterations from one comparison to the next; the first mini-batch is always compared."""
SAME_SCALE = 1e-4
"""Relative difference of two factors of the gradient up to which they are one that the loop always has; the
factors of two steps that were clipped are not that close."""


class GradientCheck:
    """Compares now and then, warns once for each kind of disagreement, and mends what it can."""

    def __init__(self, left_out: Collection[nn.Parameter] = ()) -> None:
        self._left_out = {id(p) for p in left_out}
        """Parameters that are trainable, and in no group on purpose."""
        self._given: set[str] = set()
        self._where = "closure"
        self.last_of_several = False
        """Whether the loop ends with a closure, which has the last of several micro-batches."""
        self.memory = GradientMemory()
        """What was found, which the optimizer saves with its state."""

    def __call__(
        self, evaluation: Evaluation, iteration: int, unscaled: bool = False, measured: bool = False
    ) -> Evaluation:
        """The evaluation as the step may take it: with fallback blocks, and the loss that is minimised.

        A gradient that a GradScaler has `unscaled` is compared with that of the scaled loss in every step;
        one that is clipped in every step whose ρ will be `measured`, which needs the factor.
        """
        batch = evaluation.batch
        self._where = "loop" if evaluation.reevaluate is None else "closure"
        if any(call.trace for part in batch.passes for call in part.calls):
            return evaluation  # the gradient is K-FAC's own, of all that the network consists of
        self._check_parameters(evaluation)
        self._check_gradients(evaluation)
        any_gradient = len(evaluation.without_gradient) < len(evaluation.network.units)
        if batch.assumed and self._where == "closure" and any_gradient:  # else an error will say so
            self._warn_of_assumed_loss(evaluation)
        added = evaluation.accumulated()
        memory = self.memory
        if evaluation.seen_loss is None or (added and memory.adds):
            return evaluation  # nothing to compare with
        if memory.follows_returned:
            evaluation = _scale_to_returned(evaluation)
        compared = memory.compared and (memory.zeroes_in_place or not added)
        compared = compared and not memory.undecided and not (memory.clips and measured)
        if compared and iteration > 1 and iteration % INTERVAL and not unscaled:
            return _scaled(evaluation, memory.scale)
        verdict = compare(
            evaluation,
            replace(evaluation, weight_decay=PerParameter(0.0)).gradient(),
            unscaled,
        )
        if verdict is None or unscaled:
            return evaluation if verdict is None else _scaled(evaluation, verdict.scale)
        if added and not self._as_before(verdict):
            self._warn_of_sum(verdict)
            return evaluation
        self.memory = replace(memory, compared=True, zeroes_in_place=added, last=verdict, scale=1.0)
        return self._mend(evaluation, verdict)

    def warn_of_unseen_loss(self, evaluation: Evaluation, others: Sequence[str] = ()) -> None:
        """Warn of a loop whose loss K-FAC can't compute elsewhere; it has called `others`."""
        given = type(evaluation.network.objective.module).__name__
        called = (
            f"{', '.join(others)}, another module" if others else "a function, or another module"
        )
        self._warn(
            "unseen loss",
            "KFAC.step() has not seen the loss that backward() was called on, only the model's outputs: "
            "the curvature is that of the loss that KFAC was given or kronfac.observe declared, and λ and "
            "the rejection of steps go by gradients alone, which tell less than losses. The "
            f"loop has called {called} than the {given} that KFAC was given: pass the same "
            "object to KFAC(model, loss) that the loop calls with the model's outputs, also if both "
            f"are of one class; {self._remedy_of_unseen()}",
        )

    def _remedy_of_unseen(self) -> str:
        if self.last_of_several:  # as Lightning has it, whose user writes no closure
            return (
                "the closure that step() was given has the last micro-batch alone. Without accumulated "
                "gradients functions are seen too."
            )
        return "or give step() a closure, in which all are seen."

    def _warn_of_assumed_loss(self, evaluation: Evaluation) -> None:
        """Warn of a closure whose loss K-FAC neither sees nor was told."""
        given = type(evaluation.network.objective.module).__name__
        self._warn(
            "assumed loss",
            "KFAC.step() has not seen a loss in the closure, only calls of the model: the curvature is "
            f"that of the {given} that KFAC was given, at the model's outputs, which may be far from the "
            "loss's own, and losses are compared by calling the closure again. A loss by hand, such as "
            "(r**2).mean(), is not seen: call kronfac.least_squares(r), nn.MSELoss() or another loss of "
            "torch.nn, or a kronfac.GaussNewton(loss) for what is convex in the outputs; or declare what "
            "the outputs predict with kronfac.observe. Derivatives by torch.autograd.grad can't be "
            "repeated: take them with kronfac.physics.WithDerivatives.",
        )

    def warn_of_old_gradients(self) -> None:
        """Warn of a loop that never zeroes its gradients."""
        self.memory = replace(self.memory, adds=True)
        self._warn(
            "zero_grad",
            "loss.backward() has added to the gradients that the last KFAC.step() went by: this step goes "
            "by the sum, but its curvature is that of the last mini-batch alone. Call "
            "optimizer.zero_grad() before each backward(), or once before several micro-batches.",
        )

    def _as_before(self, verdict: Verdict) -> bool:
        """Whether gradients in old tensors are what fresh ones were: so these have been zeroed in place."""
        last = self.memory.last
        expected = {last.scale, self.memory.scale}
        same = any(math.isclose(verdict.scale, scale, rel_tol=0.01) for scale in expected)
        return same and verdict.others == last.others

    def _warn_of_sum(self, verdict: Verdict) -> None:
        self.memory = replace(self.memory, adds=True)
        others = f"of {_list(verdict.others)} is not"
        finding = others if verdict.others else f"is {verdict.scale:.4g} times"
        self._warn(
            "zero_grad",
            f"The {self._where}'s gradient {finding} that of the losses it called, and there was one "
            f"before it: unless the {self._where} zeroed that, the step goes by both. Call "
            "optimizer.zero_grad() at its start.",
        )

    def _mend(self, evaluation: Evaluation, verdict: Verdict) -> Evaluation:
        """Warn of what disagrees; units with uses that are not seen get a diagonal block."""
        network = evaluation.network
        if verdict.others:
            self._warn(
                "others",
                f"The gradient of {_list(verdict.others)} is not that of the losses that KFAC sees the "
                f"{self._where} call: a penalty or another loss is in it, or derivatives by "
                "torch.autograd.grad, which KFAC can't repeat. The curvature is that of the losses seen. "
                f"{self._remedy_of_others()} Weight decay is KFAC(weight_decay=…). Derivatives of the "
                "outputs are seen if kronfac.physics.WithDerivatives takes them.",
            )
            return evaluation
        if verdict.unseen:
            names = _list(verdict.unseen)
            self._warn(
                f"uses {names}",
                f"KFAC does not see all uses of {names}: the gradient rebuilt from those it sees is not "
                f"the {self._where}'s. It gets a diagonal curvature block. Call the module instead of "
                "using its weight, or tell kronfac.register how the parameters are used.",
            )
            units = [n for n, u in enumerate(network.units) if set(u.names) & set(verdict.unseen)]
            evaluation = replace(evaluation, network=network.demoted(units))
        return self._consistent(evaluation, verdict.scale)

    def _remedy_of_others(self) -> str:
        if self._where == "loop":  # where the loss module is seen that KFAC was given, and no other
            return (
                "Give step() a closure, in which every loss is seen, or declare the rest with "
                "kronfac.observe."
            )
        return "Declare the rest with kronfac.observe."

    def _consistent(self, evaluation: Evaluation, scale: float) -> Evaluation:
        """The evaluation with a loss whose gradient is the closure's."""
        seen = evaluation.seen_loss
        assert seen is not None
        if not math.isfinite(float(evaluation.returned_loss)):
            return evaluation  # the step is refused
        ratio = float(evaluation.returned_loss) / float(seen) if float(seen) else 1.0
        if scale != 1 and abs(ratio / scale - 1) < MIXED_TOLERANCE:
            # A GradScaler: the loss is scaled on the way back, and the gradient unscaled.
            self.memory = replace(self.memory, follows_returned=True)
            return _scale_to_returned(evaluation)
        _, before = self.memory.scales
        if before is not None and math.isclose(scale, before, rel_tol=SAME_SCALE):
            # The factor that all steps have stays as it was first found, to the bit: when it is compared
            # again depends on whether there were gradients before, which a resumed run does not know.
            scale = before
        self.memory = replace(self.memory, scales=(before, scale))
        if before not in (None, scale):
            # Clipped: the curvature is that of the loss, and the gradient what it is made to be.
            return replace(evaluation, clipped=scale)
        if scale != 1:
            if before is not None:
                self._warn(
                    "scale",
                    f"The {self._where}'s gradient is {scale:.4g} times that of the losses it called, in "
                    "every step; KFAC takes the gradient for right. Scale the loss before backward(), not "
                    "the gradient after it.",
                )
            self.memory = replace(self.memory, scale=scale)
            evaluation = _scaled(evaluation, scale)
            seen = evaluation.seen_loss
            assert seen is not None
        told = scale == 1 or before is not None
        if told and not losses_agree(evaluation, float(evaluation.returned_loss), float(seen)):
            ratio = float(seen) / float(evaluation.returned_loss)
            self._warn(
                "returned",
                f"The closure returned a loss of {float(evaluation.returned_loss):.4g}, but its gradient "
                f"is that of {float(seen):.4g}, {ratio:.4g} times as much. KFAC takes the gradient for "
                "right. Return what backward() is called on, summed over all micro-batches.",
            )
        return evaluation

    def _check_parameters(self, evaluation: Evaluation) -> None:
        """Warn of parameters that are trainable and not trained."""
        network = evaluation.network
        known = {id(p) for p in network.parameters} | self._left_out
        new = [
            n for n, p in network.model.named_parameters() if p.requires_grad and id(p) not in known
        ]
        if new:
            self._warn(
                "parameters",
                f"{', '.join(map(repr, new))} became trainable after this KFAC was made, which does not "
                "train them; call add_param_group with them.",
            )

    def _check_gradients(self, evaluation: Evaluation) -> None:
        """Warn of parameters that the loss does not depend on."""
        units = evaluation.network.units
        idle = evaluation.names_without_gradient()
        if idle and len(evaluation.without_gradient) < len(units):
            self._warn(
                "gradients",
                f"The {self._where} left no gradient in {_list(idle)}, which counts as one of zero: layers "
                "that are left out of some mini-batches are no mistake. What the loss never depends on is "
                "better frozen, with requires_grad_(False) before KFAC is made.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warn(message)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _scaled(evaluation: Evaluation, factor: float) -> Evaluation:
    """The evaluation with its terms scaled; so is the loss, if it is not a closure that returned it."""
    if factor == 1:
        return evaluation
    evaluation = evaluation.scaled(factor)
    seen = evaluation.seen_loss
    if evaluation.reevaluate is not None or seen is None:
        return evaluation
    return replace(evaluation, loss=seen, returned_loss=seen)


def _scale_to_returned(evaluation: Evaluation) -> Evaluation:
    """The evaluation with its terms scaled so that their loss is the one that was returned."""
    seen = evaluation.seen_loss
    assert seen is not None
    if not float(seen) or evaluation.loss_seen():
        return evaluation
    ratio = float(evaluation.returned_loss) / float(seen)
    evaluation = evaluation.scaled(ratio)
    return in_full_precision(evaluation) if evaluation.batch.mixed else evaluation

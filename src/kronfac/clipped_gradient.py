"""What the quadratic model predicts for a step by a gradient that was clipped.

Such a gradient is what is preconditioned, but the objective follows the whole one. With g the clipped
gradient of the loss, c the factor that clipping has multiplied it by, and H the diagonal matrix of η,

    M(δ) − M(0) = gᵀδ/c + θᵀHδ + ½ δᵀ(F + λI + H)δ.

By the clipped gradient alone, ρ of a step along it would be (2 − c)/c times what it is.
"""

from dataclasses import replace

from kronfac.evaluation import Evaluation
from kronfac.network import dot
from kronfac.proposal import Proposal


def predict_by_whole_gradient(evaluation: Evaluation, proposal: Proposal) -> Proposal:
    """The proposal with the change that the gradient predicts as it was before it was clipped.

    If that is not known, as in a step for which no ρ is measured, it stays as it is.
    """
    if evaluation.clipped == 1:
        return proposal
    decay = 0.0
    if evaluation.weight_decay:
        parameters = tuple(evaluation.network.parameters)
        parts = tuple(evaluation.network.split(proposal.delta))
        decay = float(dot(parameters, tuple(evaluation.weight_decay.times(parameters, parts))))
    lost = (proposal.slope - decay) * (1 / evaluation.clipped - 1)
    step = proposal.step
    return replace(
        proposal,
        step=replace(step, predicted_change=step.predicted_change + lost),
        slope=proposal.slope + lost,
    )

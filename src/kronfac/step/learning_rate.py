"""The step as it is taken: times the learning rate of each parameter's group.

α and μ are solved for lr = 1. With L the diagonal matrix of learning rates the applied step is L δ, and

    M(Lδ) − M(0) = ∇hᵀLδ + ½ (Lδ)ᵀ(F + λI + H)Lδ,   H the diagonal matrix of η.

One lr for all parameters needs no further product: l ∇hᵀδ + ½ l² δᵀ(F + λI + H)δ.
"""

from dataclasses import replace

import torch

from kronfac.control import Step
from kronfac.groups import PerParameter
from kronfac.model import Matrices, Network
from kronfac.step.proposal import Proposal, Proposer

ONE = PerParameter(1.0)


def apply_rates(proposer: Proposer, proposal: Proposal, rates: PerParameter) -> Proposal:
    """The proposal with Lδ for δ; a learning rate of 0 for all parameters is no step at all.

    The momentum buffer is Lδ over the largest learning rate. The common factor makes no difference where μ
    is solved for; where the buffer is a memory of many steps, these count as what they are at lr = 1, or a
    schedule would make the memory shorter.
    """
    largest, step = rates.largest, proposal.step
    if rates.uniform and largest == 1:
        return proposal
    if largest == 0:
        nothing = tuple(torch.zeros_like(V) for V in proposal.delta)
        momentum = nothing if proposer.state.momentum is None else proposer.state.momentum
        still = replace(step, predicted_change=0.0, slope=0.0)
        return replace(
            proposal, step=still, delta=nothing, momentum=momentum, slope=0.0, change=None
        )
    shared = proposal.momentum is proposal.delta
    network = proposer.network
    if rates.uniform:
        delta = tuple(V * largest for V in proposal.delta)
        slope = largest * proposal.slope
        bend = largest**2 * (step.predicted_change - proposal.slope)
        return replace(
            proposal,
            step=replace(step, predicted_change=slope + bend, slope=slope),
            delta=delta,
            slope=slope,
            change=None,
        )
    delta = _times(network, rates, proposal.delta)
    relative = PerParameter(
        rates.usual / largest, {p: rate / largest for p, rate in rates.others.items()}
    )
    momentum = _times(network, relative, proposal.delta if shared else proposal.momentum)
    model = proposer.model_along(delta)
    return replace(
        proposal,
        step=Step(step.coefficients, model.change, model.slope, step.remembered),
        delta=delta,
        momentum=momentum,
        slope=model.slope,
        curvature_share=model.curvature_share,
        change=None,
    )


def _times(network: Network, rates: PerParameter, vector: Matrices) -> Matrices:
    return network.join(rates.times(network.parameters, network.split(vector)))

"""The numbers that the rules look at, from the network, its statistics and the state."""

import math

import torch

from kronfac.control import Measurement
from kronfac.factors import KroneckerFactors
from kronfac.point import Evaluation, Network
from kronfac.state import State


def measure(network: Network, evaluation: Evaluation, state: State) -> Measurement:
    """What is known before the step after `state` is computed, without waiting for the device."""
    batch, current = evaluation.batch, state.current
    refreshed = 0 if current is None else current.iteration
    return Measurement(
        iteration=state.iteration + 1,
        examples=batch.cases,
        weight_decay=evaluation.weight_decay,
        lambda_=state.damping.lambda_,
        gamma=math.nan if state.gamma is None else state.gamma.gamma,
        objective_scale=network.case_weight(batch),
        summed=network.objective.reduction == "sum",
        precision=torch.finfo(network.layers[0].dtype).eps,
        resolution=network.resolution(batch),
        confirmed=state.acceptance.confirmed,
        noise=state.acceptance.noise,
        inverse_age=state.iteration + 1 - refreshed,
        inverse_lambda=None if current is None else current.lambda_,
    )


def mean_curvature(factors: KroneckerFactors) -> float:
    """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 if that is 0 or not finite."""
    trace = sum(
        float(A.diagonal().sum().double() * G.diagonal().sum().double())
        for A, G in zip(factors.A, factors.G, strict=True)
    )
    mean = trace / sum(len(A) * len(G) for A, G in zip(factors.A, factors.G, strict=True))
    return mean if 0 < mean < math.inf else 1.0

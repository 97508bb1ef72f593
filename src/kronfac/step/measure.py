"""The numbers that the rules look at, from the evaluation and the state."""

import math

import torch

from kronfac.control import Measurement
from kronfac.step.evaluation import Evaluation
from kronfac.step.state import State


def measure(evaluation: Evaluation, state: State) -> Measurement:
    """What is known before the step after `state` is computed, without waiting for the device."""
    batch, current = evaluation.batch, state.current
    refreshed = 0 if current is None else current.iteration
    return Measurement(
        iteration=state.iteration + 1,
        examples=evaluation.examples,
        weight_decay=evaluation.weight_decay.least,
        lambda_=state.damping.lambda_,
        gamma=math.nan if state.gamma is None else state.gamma.gamma,
        summed=batch.summed,
        precision=torch.finfo(evaluation.network.dtype).eps,
        resolution=evaluation.resolution,
        confirmed=state.acceptance.confirmed,
        noise=state.acceptance.noise,
        inverse_age=state.iteration + 1 - refreshed,
        inverse_lambda=None if current is None else current.lambda_,
    )

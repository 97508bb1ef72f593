"""The loss: predictive distributions R_{y|z} over terms, with weights and a scale [MG15 §2.1]."""

from kronfac.objective.gauss_newton import GaussNewton as GaussNewton
from kronfac.objective.likelihoods import Bernoulli as Bernoulli
from kronfac.objective.likelihoods import BernoulliProbability as BernoulliProbability
from kronfac.objective.likelihoods import Categorical as Categorical
from kronfac.objective.likelihoods import Gaussian as Gaussian
from kronfac.objective.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
from kronfac.objective.likelihoods import Huber as Huber
from kronfac.objective.likelihoods import Poisson as Poisson
from kronfac.objective.loss_calls import least_squares as least_squares
from kronfac.objective.loss_calls import observe as observe
from kronfac.objective.losses import JOINED as JOINED
from kronfac.objective.losses import READERS as READERS
from kronfac.objective.objective import Objective as Objective
from kronfac.objective.objective import is_loss as is_loss
from kronfac.objective.objective import objective_of as objective_of
from kronfac.objective.terms import ElementwiseLikelihood as ElementwiseLikelihood
from kronfac.objective.terms import Likelihood as Likelihood
from kronfac.objective.terms import Terms as Terms
from kronfac.objective.terms import likelihood_loss as likelihood_loss

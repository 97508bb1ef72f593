"""The network around θ: outputs f, J v and Jᵀ r, by hand for perceptrons, else by torch [MG15 App. C]."""

from kronfac.linearize.base import Linearization as Linearization
from kronfac.linearize.base import Traced as Traced
from kronfac.linearize.base import fisher_gram as fisher_gram
from kronfac.linearize.base import fisher_product as fisher_product
from kronfac.linearize.base import linearize as linearize
from kronfac.linearize.by_hand import ByHand as ByHand
from kronfac.linearize.by_hand import Trace as Trace
from kronfac.linearize.by_hand import trace_of as trace_of

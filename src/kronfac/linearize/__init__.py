"""The network around θ: outputs f, J v and Jᵀ r, by hand for perceptrons, else by torch [MG15 App. C]."""

from kronfac.linearize.base import Linearization as Linearization
from kronfac.linearize.base import Traced as Traced
from kronfac.linearize.by_hand import ByHand as ByHand
from kronfac.linearize.by_hand import Trace as Trace
from kronfac.linearize.by_hand import trace_of as trace_of
from kronfac.linearize.explicit import Explicit as Explicit
from kronfac.linearize.explicit import Linearizer as Linearizer
from kronfac.linearize.explicit import can_be_explicit as can_be_explicit
from kronfac.linearize.explicit import linearize as linearize

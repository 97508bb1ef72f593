"""What can go wrong, by cause.

`ValueError` and `TypeError` are for arguments that are wrong on their own; the classes here are for
what only shows against a model, a mini-batch or a matrix.
"""


class KronfacError(Exception):
    """Base class of every error that kronfac raises itself."""


class UnsupportedModelError(KronfacError, ValueError):
    """The model holds something that the chosen curvature cannot describe."""


class UnsupportedLossError(KronfacError, ValueError):
    """The loss is not the negative log-likelihood of a known predictive distribution."""


class TargetError(KronfacError, ValueError):
    """The targets do not fit the outputs."""


class ClosureError(KronfacError, RuntimeError):
    """The closure did not do what a step needs of it."""


class LoopError(ClosureError):
    """A training loop without a closure did not do what a step needs of it."""


class ExampleError(KronfacError, ValueError):
    """The example of a plan is not what the model, or the loss, takes."""


class StateError(KronfacError, ValueError):
    """A saved state does not fit this optimizer."""


class RankError(KronfacError, RuntimeError):
    """Another process has failed, does something else or does not answer: no process takes this step."""


class NotPositiveDefiniteError(KronfacError, ArithmeticError):
    """A matrix that has to be positive definite is not, even after float64 and jitter."""


class MemoryExhaustedError(KronfacError, MemoryError):
    """There was no memory for a refresh of the inverse."""


class NonFiniteError(KronfacError, ArithmeticError):
    """A matrix holds NaN or infinity."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory; that of CPUs has no type."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)

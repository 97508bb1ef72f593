"""WhitenedMomentum: momentum, preconditioned by what every weight is multiplied with, and orthogonalised.

For a weight W (m × n) with gradient g and inputs a, A = E[a aᵀ], ā = tr A / n:

    M ← β M + (1 − β) g,   D = (1 − β) g + β M
    X = polar(D (A + 0.2 ā I)⁻¹)            "polar", where these products are cheap beside the layer's own,
    X = D (A/ā + 0.03 I)^(−1/2)             "whitened", elsewhere,
    W ← (1 − lr · wd) W − lr · 0.2 √(m n) X / ‖X‖_F.

All other parameters get AdamW at the same learning rate, whose updates are about as large per number.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from kronfac.distributed import World, inner_model, refuse_distributed
from kronfac.errors import LoopError, NonFiniteError, NotPositiveDefiniteError
from kronfac.groups import Params
from kronfac.linalg.polar import normalized, polar, polar_cost
from kronfac.linalg.spd import eigh, shifted_inverse
from kronfac.model.input_factors import InputObserver, Seen, precise
from kronfac.model.network import MatrixLayout
from kronfac.model.side_effects import device_of, without_traces
from kronfac.warn import warn

METHODS = ("adam", "polar", "whitened")
"""A state has the place of its method in this list: torch's loading of states takes no text."""
ADAM, POLAR, WHITENED = range(3)
RMS = 0.2
"""Size of an update per learning rate and number, as Adam's has [Moonlight, arXiv 2502.16982]."""
WARM_UP = 0.02
"""The share of the horizon in which the learning rate rises."""
POLAR_DAMPING, WHITENED_DAMPING = 0.2, 0.03
"""Of A, in units of its mean eigenvalue."""
POLAR_PAYS, WHITENING_PAYS = 0.5, 4.0
"""What a method's products may cost, in units of the layer's own forward and backward pass."""
WIDE = 4
"""A is kept for weights with at most so many times as many inputs as outputs, which bounds the state."""
REFRESH_SHARE = 0.1
"""What inverses may cost on average, in units of the layer's own forward and backward pass."""
INVERSE_COST, EIGH_COST = 2, 25
"""Operations of an inverse and an eigendecomposition, in n³, by the time that they take beside products."""
LARGE = 2**18
"""Numbers of a weight from which it has products of its own; smaller ones of equal shape share them."""


# ------------------------------------------------------------------------------ methods and their cost


def due(iteration: int, interval: int) -> bool:
    """Whether it is time: at multiples of the interval and, before the first one, at powers of two."""
    early = iteration < interval and iteration & (iteration - 1) == 0
    return early or iteration % interval == 0


@dataclass(frozen=True)
class InputFactors:
    """How A is estimated."""

    interval: int = 20
    """Steps from one sample of inputs to the next. At first there are more, at steps 0, 1, 2, 4, 8, 16."""
    decay: float = 0.9
    """Of the moving average: min(1 − 1/k, decay) at its k-th update."""
    rows: int | None = 1024
    """Vectors in a sample, for each product; None for all."""
    widest: int = 2048
    """Weights with more inputs have A = I."""


class Treatment(NamedTuple):
    """What is done with a parameter: numbers only, which are kept in its state."""

    method: int
    rows: int
    """The vectors that it is multiplied with in a step."""
    transposed: int
    groups: int
    parts: int

    @property
    def layout(self) -> MatrixLayout:
        """How it is read as matrices."""
        return MatrixLayout(*self[2:])

    def has_factor(self, p: Tensor, inputs: InputFactors | None) -> bool:
        """Whether there is an A, and memory for it and its inverse."""
        if inputs is None or self.method == ADAM:
            return False
        b, m, n = self.layout.size(p.shape)
        return n <= inputs.widest and self.groups * n <= WIDE * b * m

    def inverse_cost(self, p: Tensor) -> int:
        """Operations of one inverse."""
        cost = INVERSE_COST if self.method == POLAR else EIGH_COST
        return cost * self.groups * self.layout.size(p.shape)[2] ** 3

    def refresh_interval(self, p: Tensor, inputs: InputFactors) -> int:
        """Steps from one inverse to the next, from what it costs."""
        steps = self.inverse_cost(p) / (REFRESH_SHARE * 6 * p.numel() * max(self.rows, 1))
        return inputs.interval * max(2, math.ceil(steps / inputs.interval))

    def inverted(self, A: Tensor) -> Tensor:
        """(A + ε ā I)⁻¹, or (A/ā + ε I)^(−1/2), for every A (groups, n, n)."""
        return torch.stack([self._inverted(each) for each in A])

    def _inverted(self, A: Tensor) -> Tensor:
        mean = A.diagonal().mean()
        if self.method == POLAR:
            return shifted_inverse(A, POLAR_DAMPING * mean, "A")
        values, vectors = eigh(A / mean, "A")
        return (vectors * (values + WHITENED_DAMPING).rsqrt()) @ vectors.mT


def choose(
    p: Tensor, seen: Seen, method: str, inputs: InputFactors | None
) -> tuple[Treatment, str]:
    """What is done with a parameter, and why.

    Args:
        p: the parameter.
        seen: what forward passes have shown of it.
        method: that of its group.
        inputs: whether there are A's.
    """

    def treated(method: int) -> Treatment:
        return Treatment(method, seen.rows, *seen.layout)

    if p.dim() < 2 or not p.numel():
        return treated(ADAM), "not a matrix"
    if method != "auto":
        return treated(METHODS.index(method)), "chosen by its group"
    _, m, n = seen.layout.size(p.shape)
    for reason, holds in (
        ("an embedding", seen.lookup),
        ("no products with it were seen", not seen.rows),
        ("the last layer", seen.head),
        ("one row or column", min(m, n) < 2),
    ):
        if holds:
            return treated(ADAM), reason
    share = polar_cost(m, n) / (6 * m * n * seen.rows)
    if share <= POLAR_PAYS:
        return treated(POLAR), f"polar costs {share:.2f} × the layer's own products"
    why = f"polar would cost {share:.1f} × the layer's own products"
    if treated(WHITENED).has_factor(p, inputs) and n / (3 * seen.rows) <= WHITENING_PAYS:
        return treated(WHITENED), why
    return treated(ADAM), f"{why}, and whitening is no better"


# ---------------------------------------------------------------------------------- what users can read


@dataclass(frozen=True)
class EverydayReport:
    """What happened so far."""

    iteration: int
    skipped: int
    """Steps that were skipped because a gradient was not finite, since this object was made."""
    lr: list[float]
    """Of every group."""
    methods: dict[str, list[str]]
    """The names of the parameters that have each method."""
    failures: dict[str, str]
    """Weights whose last A was of no use, and why; the one before it is in use, or none."""


@dataclass(frozen=True)
class ParameterPlan:
    """What one parameter gets."""

    name: str
    shape: tuple[int, ...]
    method: str
    why: str
    products: float
    """Operations of its products with inputs, forward and backward."""
    added: float
    """Operations that its method adds to a step, inverses and samples included."""
    bytes: int
    """Of its state."""

    @classmethod
    def of(
        cls, name: str, p: Tensor, seen: Seen, method: str, inputs: InputFactors | None
    ) -> "ParameterPlan":
        """The plan for a parameter; the arguments are those of `choose`."""
        chosen, why = choose(p, seen, method, inputs)
        added, numbers = 0.0, p.numel() * (2 if chosen.method == ADAM else 1)
        if chosen.method == POLAR:
            b, m, n = chosen.layout.size(p.shape)
            added += b * polar_cost(m, n)
        if inputs is not None and chosen.has_factor(p, inputs):
            n = chosen.layout.size(p.shape)[2]
            sample = min(seen.rows, inputs.rows or seen.rows)
            refresh = chosen.inverse_cost(p) / chosen.refresh_interval(p, inputs)
            added += 2 * p.numel() * n + 2 * sample * n**2 / inputs.interval + refresh
            numbers += 2 * chosen.groups * n**2
        size, products = numbers * precise(p.dtype).itemsize, 6.0 * p.numel() * seen.rows
        return cls(name, tuple(p.shape), METHODS[chosen.method], why, products, added, size)

    def __str__(self) -> str:
        shape, share = "×".join(map(str, self.shape)), self.added / max(self.products, 1.0)
        return (
            f"{self.name:40} {shape:>16} {self.method:9} {share:6.2f} {self.bytes:12,}  {self.why}"
        )


@dataclass(frozen=True)
class EverydayPlan:
    """What all parameters get, and what it costs."""

    rows: list[ParameterPlan]
    cost: float
    """Operations of a step in units of AdamW's, as far as they are products with weights."""
    state: float
    """Bytes of the state, in units of the parameters' own."""

    def __str__(self) -> str:
        head = f"{'parameter':40} {'shape':>16} {'method':9} {'added':>6} {'bytes':>12}  why"
        cost = f"{self.cost:.2f} × AdamW's. State: {self.state:.1f} × the parameters."
        return "\n".join([head, *map(str, self.rows), f"Cost of a step: {cost}"])


# ------------------------------------------------------------------------------------------ the optimizer


class WhitenedMomentum(torch.optim.Optimizer):
    """Momentum, whitened by input factors and orthogonalised, in the place of AdamW.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        ... )
        >>> optimizer = WhitenedMomentum(model, steps=100)
        >>> x = torch.randn(256, 2)
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     nn.functional.mse_loss(model(x), x.prod(dim=1, keepdim=True)).backward()
        ...     optimizer.step()

    Args:
        model: the module that the loop calls, or one inside of it; if it is compiled, the compiled one.
        lr: learning rate of all methods.
        weight_decay: of parameters with two or more dimensions, or, if `params` is given, of all of them.
        steps: if given, the rate rises over the first 2 % of so many steps, then falls linearly to zero.
        seconds: the same for wall-clock time, which begins with the first step. A resumed run goes on
            with what was left, but is not bit-exact.
        params: parameters, or groups that may have their own `lr`, `weight_decay`, `momentum`, `betas` and
            `method`. None for all of the model's.
        method: of weight matrices: `"polar"`, `"whitened"`, `"adam"`, or `"auto"`: by their cost, and Adam
            for embeddings, the last layer and weights whose products are not seen.
        momentum: β.
        betas: Adam's.
        inputs: how A is estimated; None for A = I.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.01,
        *,
        weight_decay: float = 0.1,
        steps: int | None = None,
        seconds: float | None = None,
        params: Params | None = None,
        method: str = "auto",
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.95),
        inputs: InputFactors | None = InputFactors(),  # noqa: B008, it is frozen
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "WhitenedMomentum needs the model itself, whose layers it looks at, not its parameters: "
                f"WhitenedMomentum(model, lr=0.01, params=…); got a {type(model).__name__}."
            )
        if isinstance(lr, nn.Module) or callable(lr):
            raise TypeError(
                "WhitenedMomentum takes the model and a learning rate, and needs no loss: "
                f"WhitenedMomentum(model, lr=0.01); got a {type(lr).__name__} as the learning rate."
            )
        horizons = [h for h in (steps, seconds) if h is not None]
        if len(horizons) > 1 or any(isinstance(h, bool) or not 0 < h < math.inf for h in horizons):
            raise ValueError(
                "WhitenedMomentum takes a positive number of steps or of seconds, or neither if you use "
                f"a scheduler; got steps={steps!r}, seconds={seconds!r}."
            )
        refuse_distributed(model)
        self.model, self.inputs, self.steps, self.seconds = model, inputs, steps, seconds
        if params is None:
            # Vectors (biases, gains) are not pulled to zero.
            trained = list(inner_model(model).parameters())
            apart = [[p for p in trained if (p.dim() > 1) is matrix] for matrix in (True, False)]
            decays = zip(apart, (weight_decay, 0.0), strict=True)
            params = [{"params": part, "weight_decay": decay} for part, decay in decays if part]
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "method": method, "momentum": momentum,
            "betas": tuple(betas), "eps": 1e-8, "iteration": 0, "elapsed": 0.0,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._skipped: Tensor | float = 0.0
        self._listen()

    def _listen(self) -> None:
        """See forward passes from now on."""
        rows = None if self.inputs is None else self.inputs.rows
        self._observer = InputObserver(self.model, rows)
        self._shown: dict[int, Seen] = {}
        """What passes have shown of weights, by id."""
        self._failures: dict[str, str] = {}
        self._clock: float | None = None
        self._arm()

    # ---------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, by the gradients in the parameters; a closure computes them first.

        If a gradient is not finite, parameters and state stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._set_rates()
        iteration: int = self.param_groups[0]["iteration"]
        trained = [p for p in self._parameters() if p.grad is not None and p.numel()]
        self._refuse(trained)
        if self._observer.armed:
            self._learn(iteration)
        if trained:
            finite = self._finite([_gradient(p) for p in trained])
            on_host = finite.device.type == "cpu"  # where reading it waits for nothing
            for group in self.param_groups if not on_host or finite else ():
                self._update(group, None if on_host else finite)
        for group in self.param_groups:
            group["iteration"] = iteration + 1
        if self.inputs is not None and due(iteration + 1, self.inputs.interval):
            self._arm()
        return loss

    def _finite(self, gradients: list[Tensor]) -> Tensor:
        """Return 1 if all gradients are finite, else 0, on their device; count the skipped steps."""
        alike: dict[Any, list[Tensor]] = {}
        for g in gradients:
            alike.setdefault((g.device, g.dtype), []).append(g)
        found = [torch.zeros((), device=device) for device, _ in alike]
        for infinite, some in zip(found, alike.values(), strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_(
                some, infinite, torch.ones_like(infinite)
            )
        finite = 1 - torch.stack([infinite.to(found[0].device) for infinite in found]).amax()
        self._skipped = self._skipped + (1 - finite)
        return finite

    def _update(self, group: dict[str, Any], finite: Tensor | None) -> None:
        """Update the parameters of a group, those of equal shape and method together.

        `finite` is 0 if nothing is to change, else 1; None if that is known to be 1.
        """
        buckets: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None or not p.numel():
                continue
            state = self._begun(p, group)
            method, *_ = treatment = Treatment(*state["treatment"])
            key: tuple[Any, ...] = (method, p.dtype, p.device)
            if method != ADAM:
                alone = id(p) if p.numel() >= LARGE else 0
                key += (treatment.layout.size(p.shape), "inverse" in state, alone)
            buckets.setdefault(key, []).append(p)
        for (method, dtype, device, *_), bucket in buckets.items():
            exact, states = precise(dtype), [self.state[p] for p in bucket]
            own = [p.to(exact) for p in bucket]  # the parameters themselves in full precision
            gradients = [_gradient(p).to(exact) for p in bucket]
            update = _update_by_adam if method == ADAM else _update_matrices
            update(own, gradients, states, group, None if finite is None else finite.to(device))
            for p, new in zip(bucket, own, strict=True) if exact != dtype else ():
                p.copy_(new)

    # ----------------------------------------------------------------------------- methods and factors

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _sampled(self, p: Tensor) -> bool:
        """Whether A is taken of a weight's inputs; of one without a method, if it might need one."""
        if self.state.get(p):
            return Treatment(*self.state[p]["treatment"]).has_factor(p, self.inputs)
        return self.inputs is not None and p[0].numel() <= self.inputs.widest

    def _arm(self) -> None:
        """See the forward passes before the next step."""
        if "_modules" in vars(self.model):  # else it is a copy that is not complete yet
            weights = [p for p in self._parameters() if p.dim() > 1 and p.numel()]
            wanted = {id(p) for p in weights if p.requires_grad and self._sampled(p)}
            self._observer.arm(weights, wanted, self.param_groups[0]["iteration"])

    def _learn(self, iteration: int) -> None:
        """Choose methods and update A by what forward passes have shown, alike on all ranks."""
        found = self._observer.disarm()
        world, parameters = World.current(), self._parameters()
        facts = [
            [n, *map(int, (*seen.layout, seen.rows, seen.lookup, seen.head))]
            for n, p in enumerate(parameters)
            if (seen := found.get(id(p))) is not None
        ]
        # Ranks decide alike: by what the first of them has seen.
        facts = world.exchange(facts, device_of(self.model), "statistics")[0]
        for n, *numbers in facts:
            self._shown[id(parameters[n])] = Seen(MatrixLayout(*numbers[:3]), *numbers[3:])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._begun(p, group)
        if not (self._shown or iteration):
            warn(
                "WhitenedMomentum has seen no product of a weight in a forward pass with gradients, and "
                "uses Adam for all parameters. Give it the module that the loop calls or, if "
                "that is compiled, the one that torch.compile(model) returns."
            )
        if self.inputs is None or not due(iteration, self.inputs.interval):
            return
        sampled = [p for n, *_ in facts if self.state.get(p := parameters[n]) and self._sampled(p)]
        grams, counts = [], []
        for p in sampled:
            seen, treatment = found.get(id(p), Seen()), Treatment(*self.state[p]["treatment"])
            n = treatment.layout.size(p.shape)[2]
            zeros = p.new_zeros(treatment.groups, n, n, dtype=precise(p.dtype))
            grams.append(zeros if seen.gram is None else seen.gram)
            counts.append(float(seen.sampled))
        counts = world.sum(grams, "statistics", numbers=counts) if grams else []
        for p, gram, count in zip(sampled, grams, counts, strict=True):
            if count:
                self._average(p, gram / count, iteration, self.inputs)

    def _begun(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter; the first time, its method is chosen, which it keeps."""
        state: dict[str, Any] = self.state[p]
        if not state:
            treatment, _ = choose(p, self._shown.get(id(p), Seen()), group["method"], self.inputs)
            zeros = torch.zeros_like(p, dtype=precise(p.dtype))
            state["treatment"] = tuple(treatment)
            if treatment.method == ADAM:
                state |= {"step": zeros.new_zeros((), dtype=torch.float32), "exp_avg": zeros}
                state["exp_avg_sq"] = zeros.clone()
            else:
                state["momentum"] = zeros
        return state

    def _average(self, p: Tensor, A: Tensor, iteration: int, inputs: InputFactors) -> None:
        """Take a sample's A into the moving average, and invert that if it is time."""
        state, name = self.state[p], self._name(p)
        treatment = Treatment(*state["treatment"])
        try:
            if not bool(A.diagonal(dim1=1, dim2=2).sum().isfinite()):
                raise NonFiniteError("The weight's inputs hold NaN or infinity.")
            samples = state["samples"] = state.get("samples", 0) + 1
            weight = 1 - min(1 - 1 / samples, inputs.decay)
            state["A"] = A if samples == 1 else torch.lerp(state["A"], A, weight)
            if due(iteration, treatment.refresh_interval(p, inputs)):
                state["inverse"] = treatment.inverted(state["A"])
            self._failures.pop(name, None)
        except (NonFiniteError, NotPositiveDefiniteError) as error:
            self._failures[name] = str(error)

    # -------------------------------------------------------------------------------------- the rate

    def _set_rates(self) -> None:
        """Set the rates of this step, if there is a horizon."""
        first = self.param_groups[0]
        if self.steps is not None:
            done, ahead = first["iteration"] / self.steps, 1 / self.steps
        elif self.seconds is not None:
            now = time.monotonic()
            elapsed = first["elapsed"] + (0.0 if self._clock is None else now - self._clock)
            first["elapsed"] = World.current().gather([elapsed], "evaluation")[0][0]
            self._clock, done, ahead = now, first["elapsed"] / self.seconds, 1e-3
        else:
            return
        if self.steps is not None and done >= 1 and first["lr"] > 0:
            warn(
                f"WhitenedMomentum was given steps={self.steps}, which are over: the learning rate is zero "
                "and further steps change nothing. Give it the number of mini-batches in all epochs."
            )
        factor = max(0.0, min((done + ahead) / WARM_UP, 1 - done))
        for group in self.param_groups:
            if "initial_lr" in group:
                raise LoopError(
                    "WhitenedMomentum was given steps= or seconds= and sets the learning rate itself, but "
                    "a scheduler sets it too. Leave out steps= and seconds=, or the scheduler."
                )
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor

    # ------------------------------------------------------------------------------- torch's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters, such as those of a layer that was added to the model."""
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        for key, rule, holds in (
            ("lr", "finite and not negative", lambda lr: 0 <= float(lr) < math.inf),
            ("weight_decay", "finite and not negative", lambda decay: 0 <= decay < math.inf),
            ("momentum", "at least 0 and below 1", _is_share),
            ("betas", "two numbers at least 0 and below 1",
             lambda betas: len(betas) == 2 and all(map(_is_share, betas))),
            ("method", f"one of {('auto', *METHODS)}", ("auto", *METHODS).__contains__),
        ):  # fmt: skip
            if not holds(group[key]):
                raise ValueError(
                    f"WhitenedMomentum's {key} has to be {rule}; group {number} has {group[key]!r}."
                )
        self._refuse(group["params"])
        group["iteration"] = self.param_groups[0]["iteration"]
        if hasattr(self, "_observer"):
            self._arm()

    def _refuse(self, parameters: Sequence[Tensor]) -> None:
        """Refuse complex parameters and sparse gradients."""
        for p in parameters:
            sparse = p.grad is not None and p.grad.layout is not torch.strided
            if sparse or p.is_complex():
                what = "has a sparse gradient" if sparse else "is complex"
                raise ValueError(
                    f"WhitenedMomentum trains real parameters by dense gradients; {self._name(p)!r} {what}."
                    " Make embeddings with sparse=False, and store a complex weight as two real ones."
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, p in zip(numbers, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    # Torch casts it to the dtype of the parameter, which may be in half precision.
                    self.state[p][key] = value.to(p.device, copy=True)
        self._listen()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made from."""
        names = ("model", "inputs", "steps", "seconds", "_skipped")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # else it is called by `load_state_dict`
            self._listen()

    # ------------------------------------------------------------------------------------ to be read

    def _name(self, p: Tensor) -> str:
        names = {id(q): name for name, q in inner_model(self.model).named_parameters()}
        return names.get(id(p), f"a parameter of shape {tuple(p.shape)}")

    @property
    def report(self) -> EverydayReport:
        """What happened so far. Reading it waits for the device."""
        methods: dict[str, list[str]] = {}
        for p, state in self.state.items():
            if state:
                methods.setdefault(METHODS[state["treatment"][0]], []).append(self._name(p))
        rates = [float(group["lr"]) for group in self.param_groups]
        iteration = self.param_groups[0]["iteration"]
        return EverydayReport(iteration, int(self._skipped), rates, methods, dict(self._failures))

    def plan(self, *example: Any, **named: Any) -> EverydayPlan:
        """List what every parameter gets, and its cost, by a forward pass that changes nothing."""
        model, armed = inner_model(self.model), self._observer.armed
        observer = InputObserver(model, None)
        self._observer.disarm()
        observer.arm([p for p in self._parameters() if p.dim() > 1 and p.numel()], (), 0)
        try:
            with torch.enable_grad(), without_traces(model):
                model(*example, **named)
        finally:
            found = observer.disarm()
            if armed:
                self._arm()
        rows = [
            ParameterPlan.of(
                self._name(p), p, found.get(id(p), Seen()), group["method"], self.inputs
            )
            for group in self.param_groups
            for p in group["params"]
        ]
        cost = 1 + sum(row.added for row in rows) / max(sum(row.products for row in rows), 1.0)
        size = sum(p.numel() * p.element_size() for p in self._parameters())
        return EverydayPlan(rows, cost, sum(row.bytes for row in rows) / max(size, 1))


# ------------------------------------------------------------------------------------------- the updates


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _is_share(number: float) -> bool:
    return 0 <= number < 1


def _update_matrices(
    own: Sequence[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    finite: Tensor | None,
) -> None:
    """Update weights of equal shape and method."""
    momenta = [state["momentum"] for state in states]
    rate, beta = group["lr"], group["momentum"]
    if finite is not None:
        # In place of a gradient that is not finite the momentum itself, which stays as it is.
        pairs, rate = zip(gradients, momenta, strict=True), rate * finite
        gradients = [torch.where(finite > 0, g, M) for g, M in pairs]
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    D = torch._foreach_lerp(gradients, momenta, beta)
    treatments = [Treatment(*state["treatment"]) for state in states]
    matrices = [t.layout.split(each) for t, each in zip(treatments, D, strict=True)]
    if "inverse" in states[0]:
        inverses = [state["inverse"] for state in states]
        matrices = [_times(each, M) for each, M in zip(matrices, inverses, strict=True)]
    X = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    X = normalized(polar(X) if treatments[0].method == POLAR else X)
    X = X * (-rate * RMS * math.sqrt(X.shape[1] * X.shape[2]))
    parts = X.split(len(X) // len(own))
    for p, treatment, part in zip(own, treatments, parts, strict=True):
        p.mul_(1 - rate * group["weight_decay"]).add_(treatment.layout.join(part, p.shape))


def _times(D: Tensor, M: Tensor) -> Tensor:
    """D M for every matrix; M (groups, n, n) is shared by the parts of a group."""
    return (D.reshape(len(M), -1, D.shape[-1]) @ M).reshape(D.shape)


def _update_by_adam(
    own: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    finite: Tensor | None,
) -> None:
    """Update parameters by torch's AdamW, which skips a step by itself."""
    means, squares, counts = (
        [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
    )
    beta1, beta2 = group["betas"]
    adamw(
        own, gradients, means, squares, [], counts,
        fused=True, found_inf=None if finite is None else 1 - finite, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip

"""A run of kfac-jax, for an environment of its own: no torch, no kronfac.

    python -I kfac_jax_script.py SETTINGS.json

reads data and initial parameters from an .npz file and appends a row of JSON, [iteration, cases, seconds,
error], for each evaluation, a line of JSON text if the run diverged. Compiling is done before the clock
starts, on copies, for each size of the mini-batch.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PARENT = os.getppid()
SETTINGS = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
# XLA makes as many threads as it may run on processors, so this has to come first.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: SETTINGS["threads"]])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import kfac_jax  # noqa: E402
import numpy as np  # noqa: E402

# Runs of a race compile the same programs.
jax.config.update("jax_compilation_cache_dir", SETTINGS["compiled"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

Tree = Any
"""Nested arrays; jax has no types to check here."""
Batch = tuple[Any, Any]

CHUNK = 5000
ADAPT_EVERY = 5
"""Steps from one adaptation of λ to the next, kfac-jax's default: such a step is another program."""
ACTIVATIONS = {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "none": lambda x: x}


def network(params: Tree, x: Any) -> Any:
    """The outputs; params are (W, b) of each layer, W (in, out)."""
    for (W, b), activation in zip(params, SETTINGS["activations"], strict=True):
        x = ACTIVATIONS[activation](x @ W + b)
    return x


def objective(params: Tree, batch: Batch) -> Any:
    """The mean loss and η/2 ‖θ‖²."""
    x, y = batch
    z = network(params, x)
    if SETTINGS["loss"] == "bernoulli":
        kfac_jax.register_sigmoid_cross_entropy_loss(z, y)
        losses = jnp.sum(jnp.logaddexp(0.0, z) - y * z, axis=1)
    elif SETTINGS["loss"] == "gaussian":
        kfac_jax.register_squared_error_loss(z, y, weight=0.5)
        losses = 0.5 * jnp.sum(jnp.square(z - y), axis=1)
    else:
        kfac_jax.register_softmax_cross_entropy_loss(z, y)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1)[:, 0]
    squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree_util.tree_leaves(params))
    return jnp.mean(losses) + 0.5 * SETTINGS["weight_decay"] * squares


@jax.jit  # type: ignore[untyped-decorator]
def total_error(params: Tree, x: Any, y: Any) -> Any:
    """Summed over the cases."""
    z = network(params, x)
    if SETTINGS["loss"] == "categorical":
        return 100.0 * jnp.sum(jnp.argmax(z, axis=1) != y)
    outputs = jax.nn.sigmoid(z) if SETTINGS["loss"] == "bernoulli" else z
    return jnp.sum(jnp.square(outputs - y))


def error(params: Tree, x: Any, y: Any) -> float:
    """A case, as kronfac measures it."""
    parts = range(0, len(x), CHUNK)
    return sum(float(total_error(params, x[i : i + CHUNK], y[i : i + CHUNK])) for i in parts) / len(
        x
    )


class Feed:
    """Mini-batches of the present size, each the first cases of a fresh permutation.

    kfac-jax takes more than one for its first step, so cases are counted here, and the time that
    gathering them takes, which is no one's in the race.
    """

    def __init__(self, x: Any, y: Any, seed: int) -> None:
        self._x, self._y = x, y
        self._generator = np.random.default_rng(seed)
        self.size, self.cases, self.seconds = 0, 0, 0.0

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        indices = self._generator.permutation(len(self._x))[: self.size]
        batch: Batch = jax.block_until_ready(
            (jnp.array(self._x[indices]), jnp.array(self._y[indices]))
        )
        self.cases += len(indices)
        self.seconds += time.perf_counter() - began
        return batch


@jax.jit  # type: ignore[untyped-decorator]
def mixed(average: Tree, params: Tree, decay: float) -> Tree:
    """ξ average + (1 − ξ) params."""
    return jax.tree_util.tree_map(lambda a, p: decay * a + (1 - decay) * p, average, params)


def copied(tree: Tree) -> Tree:
    """New buffers: the optimizer gives those that it gets away."""
    return jax.tree_util.tree_map(lambda leaf: jnp.array(leaf, copy=True), tree)


def main() -> None:
    """Run until the limit or the error that is asked for."""
    with np.load(SETTINGS["arrays"], allow_pickle=False) as arrays:
        x = arrays["inputs"]
        y = arrays.get("targets", x)
        count = len(SETTINGS["activations"])
        # kronfac has W as (out, in).
        start = [(jnp.array(arrays[f"W{i}"].T), jnp.array(arrays[f"b{i}"])) for i in range(count)]
    sample = (
        jnp.array(x[: SETTINGS["evaluation_cases"]]),
        jnp.array(y[: SETTINGS["evaluation_cases"]]),
    )
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(objective),
        l2_reg=SETTINGS["weight_decay"],
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=SETTINGS["lambda0"],
        damping_adaptation_interval=ADAPT_EVERY,
        multi_device=False,
    )
    key = jax.random.PRNGKey(SETTINGS["seed"])
    feed, rehearsal = Feed(x, y, SETTINGS["seed"]), Feed(x, y, SETTINGS["seed"])
    sizes = SETTINGS["sizes"]
    compiled: set[int] = set()
    params, average = copied(start), copied(start)
    rehearsal.size = sizes[0]
    state = optimizer.init(copied(params), key, next(rehearsal))
    seconds, marks = 0.0, list(SETTINGS["marks"])
    with Path(SETTINGS["rows"]).open("a", encoding="utf-8", buffering=1) as out:
        print(json.dumps([0, 0, 0.0, error(params, *sample)]), file=out)
        for k in itertools.count(1):
            if os.getppid() != PARENT:  # killed, so nobody waits for the rest
                return
            feed.size = rehearsal.size = sizes[min(k, len(sizes)) - 1]
            key, own = jax.random.split(key)
            if feed.size not in compiled:  # steps discarded, so that the clock sees no compiler
                for step in (k - 1, ADAPT_EVERY - 1):
                    tried = optimizer.step(
                        copied(params), copied(state), own, data_iterator=rehearsal,
                        global_step_int=step,
                    )  # fmt: skip
                jax.block_until_ready((tried[0], mixed(average, params, 0.5)))
                compiled.add(feed.size)
            began, fed = time.perf_counter(), feed.seconds
            params, state, stats = optimizer.step(
                params, state, own, data_iterator=feed, global_step_int=k - 1
            )
            average = mixed(average, params, 0.0 if k == 1 else SETTINGS["decay"])
            jax.block_until_ready((params, average, stats["loss"]))
            seconds += time.perf_counter() - began - (feed.seconds - fed)
            measured = [float(stats["loss"])]
            if seconds >= marks[0]:
                marks = [mark for mark in marks if mark > seconds] or [SETTINGS["limit"]]
                measured.append(float(np.fmin(error(params, *sample), error(average, *sample))))
            if not np.isfinite(measured).all():
                print(json.dumps(f"Iteration {k}: loss or error became {measured[-1]}."), file=out)
                return
            if len(measured) > 1:
                print(json.dumps([k, feed.cases, seconds, measured[-1]]), file=out)
                if measured[-1] <= SETTINGS["until"] or seconds >= SETTINGS["limit"]:
                    return


main()

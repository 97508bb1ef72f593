"""A conformance kit for adapters of module types."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac.model import Matrices, Network, Site, find_network, record_uses
from kronfac.objective import Gaussian, objective_of


def check_adapter(module: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> None:
    """Check how K-FAC sees the uses of a module's parameters, by one call with these arguments.

    - all trained parameters are described by an adapter, and have uses;
    - the gradient rebuilt from the uses is autograd's;
    - so is that of every example, if the examples are the first dimension of arguments and outputs;
    - a use that the adapter itself reports has the outputs Σ_p P inputs_p, the parameters as matrices.

    Raises:
        AssertionError: it does not hold.
    """
    module = copy.deepcopy(module).double()
    args = tuple(a.double() if _floating(a) else a for a in args)
    network = find_network(module, objective_of(Gaussian()))
    unknown = [u.name for u in network.units if not u.chosen]
    assert not unknown, f"No adapter describes {unknown} of {type(module).__name__}."
    for site in network.sites:
        _check_products(site, args, kwargs)
    examples = next(len(a) for a in args if isinstance(a, Tensor))
    with (
        torch.enable_grad(),
        record_uses(network.sites, network.units, examples) as seen,
    ):
        outputs = module(*args, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
    at_uses = torch.autograd.grad(outputs, seen.uses.edges, cotangent, retain_graph=True)
    truth = _gradient(network, outputs, cotangent)
    single = []
    if len(outputs) == examples:
        rows = torch.eye(examples, dtype=outputs.dtype).view(
            examples, examples, *[1] * (outputs.dim() - 1)
        )
        single = [_gradient(network, outputs, cotangent * row) for row in rows]
    for n, unit in enumerate(network.units):
        taps = seen.uses.taps(n, at_uses)
        assert taps, f"No use of {unit.name!r} is seen."
        rebuilt = torch.stack([tap.total() for tap in taps]).sum(dim=0)
        assert_close(rebuilt, truth[n], rtol=1e-8, atol=1e-10)
        if single and all(tap.examples == examples for tap in taps):
            own = torch.stack([tap.gradients() for tap in taps]).sum(dim=0)
            assert_close(own, torch.stack([V[n] for V in single]), rtol=1e-8, atol=1e-10)


def _gradient(network: Network, outputs: Tensor, cotangent: Tensor) -> Matrices:
    grads = torch.autograd.grad(
        outputs, network.parameters, cotangent, retain_graph=True, allow_unused=True
    )
    return network.join(
        [
            torch.zeros_like(p) if g is None else g
            for g, p in zip(grads, network.parameters, strict=True)
        ]
    )


def _check_products(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The uses that an adapter reports of one call."""
    output = site.module(*args, **kwargs)
    for use in site.adapter.uses(site.module, args, kwargs, output):  # type: ignore[attr-defined]
        products = [
            p if x is None else x @ p.reshape(len(p), -1).mT
            for p, x in ((getattr(site.module, name), x) for name, x in use.inputs.items())
            if p is not None
        ]
        assert_close(sum(products), use.arranged(use.outputs), rtol=1e-8, atol=1e-10)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

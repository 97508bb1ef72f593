"""A conformance kit for adapters of module types."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac.network import Buffers, Network, Use, find_units, record_uses
from kronfac.objective import Gaussian, objective_of


def check_adapter(module: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> None:
    """Check the adapter that is registered for a module's type, by one call with these arguments.

    - a use's outputs are Σ_p P inputs_p, the parameters as matrices, at every example and place;
    - the gradient rebuilt from the uses, Σ g āᵀ, is autograd's;
    - all trained parameters are described.

    Raises:
        AssertionError: it does not hold.
    """
    module = copy.deepcopy(module).double()
    args = tuple(a.double() if _floating(a) else a for a in args)
    found = find_units(module)
    network = Network(module, found.units, found.sites, objective_of(Gaussian()), Buffers(module))
    assert found.sites, f"No adapter is registered for {type(module).__name__}."
    unseen = [u.name for n, u in enumerate(network.units) if not network.has_uses(n)]
    assert not unseen, f"The adapter does not describe {unseen}."
    calls: list[list[Use]] = []
    site = found.sites[0]

    def hook(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(site.adapter.uses(called, args, kwargs, output))

    handle = site.module.register_forward_hook(hook, with_kwargs=True)
    with torch.enable_grad(), record_uses(network.sites, len(network.units)) as uses:
        outputs = module(*args, **kwargs)
    handle.remove()
    for use in calls[0]:
        products = [
            p if x is None else x @ p.reshape(len(p), -1).mT
            for p, x in ((getattr(site.module, name), x) for name, x in use.inputs.items())
            if p is not None
        ]
        assert_close(sum(products), use.arranged(use.outputs), rtol=1e-8, atol=1e-10)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
    at_uses = torch.autograd.grad(outputs, uses.edges, cotangent, retain_graph=True)
    truth = iter(torch.autograd.grad(outputs, network.parameters, cotangent))
    for n, unit in enumerate(network.units):
        expected = unit.join([next(truth) for _ in unit.parameters])
        pairs = list(zip(uses.of(n), uses.grads(n, at_uses), strict=True))
        assert pairs, f"The adapter reports no use of {unit.name!r}."
        rebuilt = sum(torch.einsum("nsr,nsc->rc", g, a) for a, g in pairs)
        assert_close(rebuilt, expected, rtol=1e-8, atol=1e-10)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

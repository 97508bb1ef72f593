"""nn.Linear: s = W a + b, with any number of dimensions between the first and the last."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from kronfac.network.adapter import Use, register


class LinearAdapter:
    """The weight is multiplied with the module's input, the bias with ones."""

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """Weight and bias; the weight first, in whatever order they were registered."""
        own = module._parameters
        named = {name: own.get(name) for name in ("weight", "bias")}
        return {name: p for name, p in named.items() if p is not None}

    def uses(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> list[Use]:
        """One use per call."""
        x: Tensor = args[0] if args else kwargs["input"]
        return [Use({"weight": x, "bias": None}, output)]


register(nn.Linear, LinearAdapter())

"""Which layers of a model K-FAC trains."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList

from kronfac.errors import UnsupportedModelError
from kronfac.layers.base import Layer
from kronfac.layers.linear import LinearLayer


def find_layers(model: nn.Module) -> list[Layer]:
    """Adaptors of all layers with trainable parameters, in the order of `model.named_modules()`.

    Raises:
        UnsupportedModelError: a trainable parameter belongs to no supported layer, to half of one,
            or to two of them; or there is none at all.
    """
    layers: list[Layer] = []
    owner: dict[int, str] = {}
    for name, module in model.named_modules():
        trainable = [p.requires_grad for p in module.parameters(recurse=False)]
        # Exact type: a subclass may do something else in its forward, as attention's packed
        # projection does.
        if type(module) is not nn.Linear or not any(trainable):
            continue
        # Reparametrised by hooks (spectral_norm, pruning): the weight is computed from other parameters.
        if not {key for key, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}:
            continue
        if not all(trainable):
            raise UnsupportedModelError(
                f"KFAC trains a layer's weight and bias together; of layer {name!r} only one has "
                "requires_grad. Freeze both or neither."
            )
        for parameter in module.parameters(recurse=False):
            if id(parameter) in owner:
                raise UnsupportedModelError(
                    f"KFAC does not support tied weights; layers {owner[id(parameter)]!r} and "
                    f"{name!r} share a parameter."
                )
            owner[id(parameter)] = name
        layers.append(LinearLayer(name, module))
    _refuse_other_parameters(model, layers)
    if not layers:
        raise UnsupportedModelError(
            f"KFAC found no trainable nn.Linear in {type(model).__name__}; it has nothing to train."
        )
    for layer in layers:
        if layer.dtype not in (torch.float32, torch.float64):
            raise UnsupportedModelError(
                f"KFAC needs real parameters in float32 or float64; layer {layer.name!r} has "
                f"{layer.dtype}. Half precision is for the closure: call step inside torch.autocast."
            )
    return layers


def refuse_changes(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse what a step can't be made with; it may have come after the layers were found.

    Raises:
        UnsupportedModelError: one of the layers is frozen or has another forward function, or cases
            depend on each other.
    """
    for layer in layers:
        if not all(p.requires_grad for p in layer.parameters()):
            raise UnsupportedModelError(
                f"Layer {layer.name!r} has been frozen since this KFAC was made, which trains it; make "
                "a new one after changing the model."
            )
        if "forward" in layer.module.__dict__:
            raise UnsupportedModelError(
                f"Layer {layer.name!r} has a forward function of its own, put in the place of its class's; "
                "KFAC knows what an nn.Linear computes and would train something else. Put what it "
                "adds into a module behind the layer."
            )
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            name = next(name for name, other in model.named_modules() if other is module)
            raise UnsupportedModelError(
                f"Module {name!r} ({type(module).__name__}) normalises over the mini-batch, so that cases "
                "depend on each other, and K-FAC's own passes would go into its running statistics. "
                "Call .eval() on it, or leave it out."
            )


def _refuse_other_parameters(model: nn.Module, layers: list[Layer]) -> None:
    """Refuse trainable parameters of modules that are none of `layers`, all at once.

    By module and not by parameter, because a Linear's weight may also be, say, an Embedding's.
    """
    modules = {id(layer.module) for layer in layers}
    others = [
        (f"{prefix}.{key}" if prefix else key, type(module))
        for prefix, module in model.named_modules()
        if id(module) not in modules
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    if others:
        raise UnsupportedModelError(describe_unsupported(others))


def describe_unsupported(parameters: Sequence[tuple[str, type[nn.Module]]]) -> str:
    """The message that refuses these parameters: each by its name, with the type of its module."""
    by_type: dict[type[nn.Module], list[str]] = {}
    for name, kind in parameters:
        by_type.setdefault(kind, []).append(name)
    lines = [
        f"  {kind.__name__}{_reason(kind)}: {', '.join(map(repr, names))}"
        for kind, names in by_type.items()
    ]
    return "\n".join(
        [
            "KFAC trains nn.Linear layers; these trainable parameters belong to other types of modules:",
            *lines,
            "Freeze them with requires_grad_(False), which leaves them at their values; or build the model "
            "from nn.Linear and modules without parameters.",
        ]
    )


def _reason(kind: type[nn.Module]) -> str:
    """Why a module that is a Linear, or has to do with one, is none for K-FAC; with the remedy."""
    if kind is nn.Linear or issubclass(kind, ParametrizationList):
        return (
            " (reparametrised: its weight is computed from other parameters; "
            "torch.nn.utils has a function that removes that)"
        )
    if issubclass(kind, nn.Linear):
        return " (a subclass, whose forward may compute something else; nn.Linear itself will do)"
    return ""

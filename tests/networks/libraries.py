"""Libraries of networks, imported when a test first needs them: that takes seconds."""

import importlib
import os
from functools import cache
from types import ModuleType

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import: everything is built from configs

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def transformers() -> ModuleType:
    import_torchvision()
    return importlib.import_module("transformers")


@cache
def timm() -> ModuleType:
    import_torchvision()
    return importlib.import_module("timm")


@cache
def import_torchvision() -> None:
    """Import torchvision, whose compiled operators may be for another build of torch (CUDA, CPU) than ours.

    It then fails at the two operators that it describes without having them. No network here uses them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", NMS)
        importlib.import_module("torchvision")

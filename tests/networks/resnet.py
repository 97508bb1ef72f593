"""A ResNet of timm: convolutions, BatchNorm, residual sums."""

from tests.networks.libraries import timm
from tests.networks.training import CLASSES


def resnet():
    """ResNet-18 with narrow stages."""
    return timm().create_model("resnet18", channels=(8, 16, 16, 16), num_classes=CLASSES)

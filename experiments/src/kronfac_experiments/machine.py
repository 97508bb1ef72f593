"""The machine: what measured numbers depend on besides the configuration, and its devices."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kronfac": version("kronfac"),
        "numpy": np.__version__,
    }


def machine() -> dict[str, Any]:
    """What the seconds depend on; nothing that names the computer."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processors": os.cpu_count(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor()


def usable_device(name: str) -> torch.device:
    """The device, if it can be used here.

    Raises:
        ValueError: it can't.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    # "cuda" without CUDA is an AssertionError or a RuntimeError, "meta" is NotImplementedError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--device {name} can't be used here: {reason}") from error
    return device

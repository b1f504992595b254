"""The machine, its GPU, the versions and the code that the report is of. It imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from load.bench.framework import machine
from load.gpu_report.rig import Size

_ROOT = Path(__file__).parents[2]
# What a figure depends on.
_CODE = ("kernels", "libs", "load", "services")
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "peft")
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_SMI_S = 30.0


def setting_of(size: Size, device: str) -> Mapping[str, str]:
    """Return all that tells a figure from another one."""
    return {
        "size": size.name,
        "device": device,
        "machine": machine(),
        "gpu": gpu_name() if device.startswith("cuda") else "none",
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "code": code_digest(),
    }


def gpu_name() -> str:
    """Return nvidia-smi's name, memory and driver of all GPUs."""
    if shutil.which(_SMI[0]) is None:
        return "no nvidia-smi"
    answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=False)
    return "; ".join(answer.stdout.splitlines()) or answer.stderr.strip()


def version_of(package: str) -> str:
    """Return a package's version, "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def code_digest() -> str:
    """Return 12 hex digits of the Python files that are measured and of those that measure."""
    total = hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (_ROOT / name).rglob("*.py")):
        if "build" not in path.parts:
            total.update(f"{path.relative_to(_ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]

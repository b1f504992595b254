"""Random LoRAs for benches, each as Diffusers saves it and in the suite's canonical form, and services for them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData, write
from bottega.model_files.family_names import TRANSFORMER, UNET

BASE = "bench"
"""What LoRAs call the bench model."""

# What Diffusers' own training scripts touch.
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
# What kohya's do: 722 modules of SDXL's UNet.
TRANSFORMERS = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFiles:
    """The files of one LoRA."""

    theirs: Path
    """As Diffusers saves it."""
    ours: Path
    """In the canonical form."""
    digest: str
    """SHA-256 of the canonical form."""
    size_bytes: int
    """Bytes of its weights."""


def random_lora(model: Path, folder: Path, *, seed: int, rank: int, targets: Sequence[str] = ATTENTION) -> LoraFiles:
    """Write a LoRA of float16 for the modules of a model's denoising network whose path ends with a target."""
    denoiser = TRANSFORMER if (model / TRANSFORMER).is_dir() else UNET
    generator = torch.Generator().manual_seed(seed)
    theirs: dict[str, Tensor] = {}
    modules: list[ModuleWeights] = []
    folder.mkdir(parents=True, exist_ok=True)
    for path, shape in _shapes(model / denoiser, targets):
        out, *rest = shape
        down = (torch.randn(rank, *rest, generator=generator) / math.sqrt(math.prod(rest))).half()
        up = (torch.randn(out, rank, *[1] * (len(rest) - 1), generator=generator) / 50).half()
        theirs |= {f"{denoiser}.{path}.lora_A.weight": down, f"{denoiser}.{path}.lora_B.weight": up}
        parts = {"down": _weights(down), "up": _weights(up)}
        modules.append(ModuleWeights(component=denoiser, path=path, scale=1.0, parts=parts))
    save_file(theirs, folder / f"{seed}.safetensors")
    ours = folder / f"{seed}.lora"
    with ours.open("wb") as file:
        write(file, modules)
    return LoraFiles(
        theirs=folder / f"{seed}.safetensors",
        ours=ours,
        digest=hashlib.sha256(ours.read_bytes()).hexdigest(),
        size_bytes=sum(tensor.nbytes for tensor in theirs.values()),
    )


def cold_services(
    model: Path, threads: int, *, links: Mapping[str, object] | None = None, worker: bool = True
) -> dict[str, dict[str, object]]:
    """Return a LoRA store and a worker that keep nothing in memory: each request's LoRAs come from the store's disk.

    Args:
        threads: Of the engine.
        links: Settings of the store's links.
        worker: Whether there is one.
    """
    store: dict[str, object] = {"bases": {BASE: str(model)}, "links": links or {}, "budget_bytes": 1}
    return {"loras": store, **({"worker": {"engine": cold_engine(model, threads)}} if worker else {})}


def cold_engine(model: Path, threads: int) -> dict[str, object]:
    """Return an engine that keeps no LoRA beyond the requests that use it."""
    return {"model": str(model), "model_name": BASE, "threads": threads, "loras": {"budget_bytes": 1}}


def _shapes(folder: Path, targets: Sequence[str]) -> list[tuple[str, list[int]]]:
    shapes = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                module = name.removesuffix(".weight")
                if name != module and module.endswith(tuple(targets)):
                    shapes.append((module, file.get_slice(name).get_shape()))
    return sorted(shapes)


def _weights(tensor: Tensor) -> TensorData:
    return TensorData(dtype="F16", shape=tuple(tensor.shape), data=tensor.numpy().tobytes())

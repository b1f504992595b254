"""LoRA files for tests: random ones in the namings of trainers, and what a canonical file adds to each module."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bottega.addons.loras.engine import Layers, LoraLayer, WholeLayer, make_layer
from bottega.addons.loras.wire import canonical, module_parts
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.miniature import WEIGHTS
from bottega.safetensors_header import LENGTH_BYTES, TensorEntry, header_bytes

SDXL_COMPONENTS = ("text_encoder", "text_encoder_2", "unet")
"""Parts of SDXL that LoRAs change."""
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one module gets. rank: of `down` and `up`; alpha: None leaves it out."""

    rank: int
    alpha: float | None = None


def base_shapes(component: str, folder: Path = WEIGHTS) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model's linear layers and convolutions, by path."""
    shapes = {}
    for path in (folder / component).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                shape = tuple(file.get_slice(name).get_shape())
                if name.endswith(".weight") and len(shape) in {2, 4} and "embeddings" not in name:
                    shapes[name.removesuffix(".weight")] = shape
    return shapes


def factors(shape: tuple[int, ...], rank: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """down and up of one module, random."""
    outputs, inputs, *kernel = shape
    down = torch.randn(rank, inputs, *kernel, generator=generator) / math.sqrt(inputs)
    return down, torch.randn(outputs, rank, *[1] * len(kernel), generator=generator) / math.sqrt(rank)


def delta(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """What is added to a weight, from the definition: scale * up @ down."""
    down, up = down.double(), up.double()
    return scale * (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def kohya(parts: Mapping[tuple[str, str], Part], *, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A file in kohya's naming, and by component and path what it adds, from the definition.

    parts: by component and path.
    """
    prefixes = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for (component, path), part in parts.items():
        shape = base_shapes(component)[path]
        down, up = factors(shape, part.rank, generator=generator)
        spelled = path if component == "unet" or path.startswith(("text_model", "text_proj")) else f"text_model.{path}"
        name = f"{prefixes[component]}_{spelled.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if part.alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(part.alpha)
        scale = 1.0 if part.alpha is None else part.alpha / part.rank
        deltas[f"{component}.{path}"] = delta(down, up, scale)
    return tensors, deltas


def peft(parts: Mapping[tuple[str, str], Part], folder: Path) -> dict[str, Tensor]:
    """Writes a folder of PEFT's for each component; returns by component and path what it adds, from the definition.

    parts: by component and path, each with an alpha.
    """
    generator = torch.Generator().manual_seed(0)
    deltas = {}
    for component in dict.fromkeys(component for component, _ in parts):
        tensors: dict[str, Tensor] = {}
        alphas = {}
        for path, part in ((path, part) for (of, path), part in parts.items() if of == component):
            assert part.alpha is not None
            down, up = factors(base_shapes(component)[path], part.rank, generator=generator)
            name = f"base_model.model.{path}"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
            alphas[re.escape(path)] = part.alpha
            deltas[f"{component}.{path}"] = delta(down, up, part.alpha / part.rank)
        (folder / component).mkdir(parents=True)
        save(tensors, folder / component / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "lora_alpha": 77, "alpha_pattern": alphas}
        (folder / component / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes a safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata or {}))
    return path


def canonical_layers(data: bytes) -> dict[str, dict[str, LoraLayer | WholeLayer]]:
    """Return the layers of a canonical file by component and path."""
    lora = canonical.parse(data[: header_bytes(data[:LENGTH_BYTES])], file_bytes=len(data))
    text, denoiser = data[lora.header_bytes :][: lora.text_bytes], data[lora.header_bytes + lora.text_bytes :]
    layers: dict[str, dict[str, LoraLayer | WholeLayer]] = {component: {} for component in module_parts.COMPONENTS}
    for module in lora.modules:
        section = denoiser if module.component in module_parts.DENOISERS else text
        parts = {part: _tensor(entry, section) for part, entry in module.parts.items()}
        scale = float(parts.pop(module_parts.SCALE))
        layers[module.component][module.path] = make_layer(parts, scale)
    return layers


def imported_layers(model: Path, path: Path) -> dict[str, dict[str, LoraLayer | WholeLayer]]:
    """Return the layers that a store makes of a file or a folder, by component and path.

    model: folder of the base model.
    """
    file = io.BytesIO()
    canonical.write(file, convert(sources(path), base=read_base(model)).modules)
    return canonical_layers(file.getvalue())


def canonical_deltas(path: Path) -> dict[str, Tensor]:
    """By component and path, what a canonical file with low-rank factors adds to each module."""
    return {
        f"{component}.{name}": delta(layer.down, layer.up, layer.scale)
        for component, layers in canonical_layers(path.read_bytes()).items()
        for name, layer in low_rank(layers).items()
    }


def low_rank(layers: Layers) -> dict[str, LoraLayer]:
    """Return layers that all have low-rank factors."""
    found = {path: layer for path, layer in layers.items() if isinstance(layer, LoraLayer)}
    assert found.keys() == layers.keys()
    return found


def names_of(deltas: Iterable[str], component: str) -> set[str]:
    prefix = f"{component}."
    return {name.removeprefix(prefix) for name in deltas if name.startswith(prefix)}


def _tensor(entry: TensorEntry, section: bytes) -> Tensor:
    raw = bytearray(section[entry.begin : entry.end])
    return torch.frombuffer(raw, dtype=_TORCH[entry.dtype]).reshape(entry.shape)

"""LoRAs of Stable Diffusion 3 for tests: one of every layer of the transformer, in the layouts of all trainers.

Its queries, keys and values share factors, as where they are one layer in Stability's code. So each layout can say it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from torch import Tensor

from tests.samples.lora_files import base_shapes, factors, save

Factors = tuple[Tensor, Tensor]
"""down and up."""
TRANSFORMER = "transformer"
_TEXT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
_T5 = ("SelfAttention.q", "DenseReluDense.wi_0", "DenseReluDense.wo")
_TARGETS = {"text_encoder": _TEXT, "text_encoder_2": _TEXT, "text_encoder_3": _T5}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sd3Lora:
    """A LoRA. stability: of the transformer, by names in Stability's code; text: by component and path."""

    stability: Mapping[str, Factors]
    text: Mapping[tuple[str, str], Factors]
    rank: int
    alpha: float

    @property
    def parts(self) -> dict[tuple[str, str], Factors]:
        """Factors by component and path in Diffusers' networks."""
        names = list(self.stability)
        ups = as_diffusers({name: up for name, (_, up) in self.stability.items()})
        origins = as_diffusers({name: torch.full_like(self.stability[name][1], names.index(name)) for name in names})
        downs = {path: self.stability[names[int(origin.flatten()[0])]][0].clone() for path, origin in origins.items()}
        return {(TRANSFORMER, path): (downs[path], up) for path, up in ups.items()} | dict(self.text)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def random_lora(folder: Path, *, seed: int, alpha: float = 1.0, text: bool = True, rank: int = 2) -> Sd3Lora:
    """Return a LoRA of every layer of a model's transformer, and of some of its text encoders."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Factors:
        down, up = factors(shape, rank, generator=generator)
        return down, 0.3 * up

    config = json.loads((folder / TRANSFORMER / "config.json").read_text())
    stability = {name: draw(shape) for name, shape in stability_shapes(config).items()}
    encoders = {
        (component, path): draw(shape)
        for component, targets in _TARGETS.items()
        for path, shape in base_shapes(component, folder).items()
        if path.endswith(targets)
    }
    return Sd3Lora(stability=stability, text=encoders if text else {}, rank=rank, alpha=alpha)


def stability_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a transformer, by their names in Stability's code."""
    width, patch = config["num_attention_heads"] * config["attention_head_dim"], config["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj": (width, config["in_channels"], patch, patch),
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "y_embedder.mlp.0": (width, config["pooled_projection_dim"]),
        "y_embedder.mlp.2": (width, width),
        "context_embedder": (width, config["joint_attention_dim"]),
        "final_layer.linear": (patch**2 * config["out_channels"], width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    attention, mlp = {"attn.qkv": (3, 1), "attn.proj": (1, 1)}, {"mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
    second = {"attn2.qkv": (3, 1), "attn2.proj": (1, 1)}
    for number in range(config["num_layers"]):
        is_dual = number in config["dual_attention_layers"]
        x = attention | mlp | {"adaLN_modulation.1": (9 if is_dual else 6, 1)} | (second if is_dual else {})
        context = attention | mlp | {"adaLN_modulation.1": (6, 1)}
        if number == config["num_layers"] - 1:
            context = {"attn.qkv": (3, 1), "adaLN_modulation.1": (2, 1)}
        for block, layers in (("x_block", x), ("context_block", context)):
            for name, (outputs, inputs) in layers.items():
                shapes[f"joint_blocks.{number}.{block}.{name}"] = (outputs * width, inputs * width)
    return shapes


def as_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by path in Diffusers' transformer, as Diffusers converts a checkpoint of Stability's code."""
    checkpoint = {f"{name}.weight": weight.clone() for name, weight in weights.items()}
    checkpoint |= {f"{name}.bias": torch.zeros(len(weight)) for name, weight in weights.items()}
    made = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint | {"pos_embed": torch.zeros(1)})
    return {name.removesuffix(".weight"): weight for name, weight in made.items() if name.endswith(".weight")}


def diffusers_file(lora: Sd3Lora, folder: Path) -> Path:
    """As Diffusers saves today: PEFT's names, and the configurations in the metadata."""
    tensors: dict[str, Tensor] = {}
    for (component, path), (down, up) in lora.parts.items():
        tensors |= {f"{component}.{path}.lora_A.weight": down, f"{component}.{path}.lora_B.weight": up}
    components = dict.fromkeys(component for component, _ in lora.parts)
    fields = {f"{name}.{key}": value for name in components for key, value in _config(lora, name).items()}
    return save(tensors, folder / "diffusers.safetensors", {"lora_adapter_metadata": json.dumps(fields)})


def first_diffusers_file(lora: Sd3Lora, folder: Path) -> Path:
    """As Diffusers saved first, without alphas."""
    tensors: dict[str, Tensor] = {}
    for (component, path), (down, up) in lora.parts.items():
        name = f"{component}.{path}.{'lora' if component == TRANSFORMER else 'lora_linear_layer'}"
        tensors |= {f"{name}.down.weight": down, f"{name}.up.weight": up * lora.scale}
    return save(tensors, folder / "first.safetensors")


def peft_folder(lora: Sd3Lora, folder: Path) -> Path:
    """A folder of PEFT's for each component."""
    for component in dict.fromkeys(component for component, _ in lora.parts):
        tensors: dict[str, Tensor] = {}
        for path, (down, up) in ((path, part) for (of, path), part in lora.parts.items() if of == component):
            name = f"base_model.model.{path}"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        (folder / "peft" / component).mkdir(parents=True)
        save(tensors, folder / "peft" / component / "adapter_model.safetensors")
        (folder / "peft" / component / "adapter_config.json").write_text(json.dumps(_config(lora, component)))
    return folder / "peft"


def _config(lora: Sd3Lora, component: str) -> dict[str, object]:
    targets = [path for of, path in lora.parts if of == component]
    return {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}


def kohya_file(lora: Sd3Lora, folder: Path) -> Path:
    """Names of Stability's code with underscores."""
    modules = {f"lora_unet_{_flat(name)}": part for name, part in lora.stability.items()}
    return _trained(lora, modules, folder / "kohya.safetensors")


def onetrainer_file(lora: Sd3Lora, folder: Path) -> Path:
    """Names of Diffusers with underscores."""
    modules = {f"lora_transformer_{_flat(path)}": part for (of, path), part in lora.parts.items() if of == TRANSFORMER}
    return _trained(lora, modules, folder / "onetrainer.safetensors")


def comfyui_file(lora: Sd3Lora, folder: Path) -> Path:
    """Names of Stability's code with dots; of the transformer alone."""
    modules = {f"diffusion_model.{name}": part for name, part in lora.stability.items()}
    return save(_with_alphas(lora, modules), folder / "comfyui.safetensors")


def _trained(lora: Sd3Lora, modules: Mapping[str, Factors], path: Path) -> Path:
    text = {f"lora_te{component[13:] or 1}_{_flat(name)}": part for (component, name), part in lora.text.items()}
    return save(_with_alphas(lora, {**modules, **text}), path)


def _with_alphas(lora: Sd3Lora, modules: Mapping[str, Factors]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in modules.items():
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        tensors[f"{name}.alpha"] = torch.tensor(lora.alpha)
    return tensors


def _flat(path: str) -> str:
    return path.replace(".", "_")


LAYOUTS: Mapping[str, Callable[[Sd3Lora, Path], Path]] = {
    "Diffusers": diffusers_file,
    "first names of Diffusers": first_diffusers_file,
    "PEFT": peft_folder,
    "kohya": kohya_file,
    "OneTrainer": onetrainer_file,
    "ComfyUI": comfyui_file,
}
"""What writes a file or a folder of each layout into a folder, and returns its path."""
READ_BY_STOCK = frozenset({"Diffusers", "first names of Diffusers"})
"""Layouts that stock Diffusers reads."""

"""LoRAs of transformers for tests, which change every layer, in the layouts of all trainers.

Layers that are one layer in the authors' code, such as queries, keys and values, share the down factor. So the LoRA can
be written in each layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from diffusers.loaders.single_file_utils import (
    convert_sd3_transformer_checkpoint_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from torch import Tensor

from bottega.addons.loras.wire.module_parts import TEXT_ENCODERS
from tests.samples.lora_files import base_shapes, factors, save

Factors = tuple[Tensor, Tensor]
"""down and up."""
TRANSFORMER = "transformer"
_T5_TARGETS = ("SelfAttention.q", "DenseReluDense.wi_0", "DenseReluDense.wo")
_TARGETS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    *_T5_TARGETS,
)
_COMFYUI = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
# Diffusers' converters divide the rows of Flux's layers by its own width, 3,072; models for tests have 32.
_TIMES = 96
_OF_TEXT = ("lora_te", "text_encoder")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformerLora:
    """A LoRA of a transformer and, optionally, its text encoders."""

    originals: Mapping[str, Factors]
    """Factors of the transformer's layers, by the layer's name in the authors' code."""
    text: Mapping[tuple[str, str], Factors]
    """Factors of the text encoders' layers, by component and path."""
    rank: int
    alpha: float

    @property
    def parts(self) -> dict[tuple[str, str], Factors]:
        """Factors by component and path in Diffusers' networks."""
        names = list(self.originals)
        ups = as_diffusers({name: up for name, (_, up) in self.originals.items()})
        origins = as_diffusers({name: torch.full_like(self.originals[name][1], names.index(name)) for name in names})
        downs = {path: self.originals[names[int(origin.flatten()[0])]][0].clone() for path, origin in origins.items()}
        return {(TRANSFORMER, path): (downs[path], up) for path, up in ups.items()} | dict(self.text)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def random_lora(folder: Path, *, seed: int, alpha: float = 1.0, text: bool = True, rank: int = 2) -> TransformerLora:
    """Return a LoRA of every layer of a model's transformer, and of some of its text encoders but Qwen3."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Factors:
        down, up = factors(shape, rank, generator=generator)
        return down, 0.3 * up

    config = json.loads((folder / TRANSFORMER / "config.json").read_text())
    originals = {name: draw(shape) for name, shape in original_shapes(config).items()}
    encoders = {
        (component, path): draw(shape)
        for component in TEXT_ENCODERS
        for path, shape in base_shapes(component, folder).items()
        if path.endswith(_TARGETS)
    }
    text = text and "cap_feat_dim" not in config
    return TransformerLora(originals=originals, text=encoders if text else {}, rank=rank, alpha=alpha)


def original_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a transformer, by their names in the authors' code."""
    if "cap_feat_dim" in config:
        return _z_image_shapes(config)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return _flux_shapes(config, width) if "num_single_layers" in config else _sd3_shapes(config, width)


def _z_image_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, features = config["dim"], 4 * config["in_channels"]
    hidden, time = int(width / 3 * 8), min(width, 256)
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder": (width, features),
        "final_layer.linear": (features, width),
        "final_layer.adaLN_modulation.1": (width, time),
        "t_embedder.mlp.0": (1024, 256),
        "t_embedder.mlp.2": (time, 1024),
        "cap_embedder.1": (width, config["cap_feat_dim"]),
    }
    lengths = {"layers": config["n_layers"], **dict.fromkeys(("noise_refiner", "context_refiner"), 1)}
    for block in (f"{name}.{number}" for name, length in lengths.items() for number in range(length)):
        shapes |= {f"{block}.attention.qkv": (3 * width, width), f"{block}.attention.out": (width, width)}
        shapes |= {f"{block}.feed_forward.{name}": (hidden, width) for name in ("w1", "w3")}
        shapes[f"{block}.feed_forward.w2"] = (width, hidden)
        if not block.startswith("context"):
            shapes[f"{block}.adaLN_modulation.0"] = (4 * width, time)
    return shapes


def _sd3_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    patch = config["patch_size"]
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


def _flux_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    read = {"time_in": 256, "vector_in": config["pooled_projection_dim"]}
    read |= {"guidance_in": 256} if config["guidance_embeds"] else {}
    shapes: dict[str, tuple[int, ...]] = {
        "img_in": (width, config["in_channels"]),
        "txt_in": (width, config["joint_attention_dim"]),
        **{f"{name}.in_layer": (width, inputs) for name, inputs in read.items()},
        **{f"{name}.out_layer": (width, width) for name in read},
        "final_layer.linear": (config["out_channels"] or config["in_channels"], width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    joint = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.0": (4, 1), "mlp.2": (1, 4), "mod.lin": (6, 1)}
    single = {"linear1": (7, 1), "linear2": (1, 5), "modulation.lin": (3, 1)}
    blocks = [
        *((f"double_blocks.{n}.{of}_", joint) for n in range(config["num_layers"]) for of in ("img", "txt")),
        *((f"single_blocks.{n}.", single) for n in range(config["num_single_layers"])),
    ]
    for start, layers in blocks:
        shapes |= {f"{start}{name}": (outputs * width, inputs * width) for name, (outputs, inputs) in layers.items()}
    return shapes


def as_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by path in Diffusers' transformer, as Diffusers converts those of the authors' code."""
    if any(name.startswith("double_blocks") for name in weights):
        file = {}
        for name, weight in weights.items():
            file[f"lora_unet_{_flat(name)}.lora_down.weight"] = torch.ones(1, 1)
            file[f"lora_unet_{_flat(name)}.lora_up.weight"] = weight
        made = _convert_kohya_flux_lora_to_diffusers(repeat_outputs(file))
        ups = {name: up for name, up in unrepeat_outputs(made).items() if name.endswith(".lora_B.weight")}
        return {name.removeprefix("transformer.").removesuffix(".lora_B.weight"): up for name, up in ups.items()}
    checkpoint = {f"{name}.weight": weight.clone() for name, weight in weights.items()}
    if "cap_embedder.1" in weights:
        made = convert_z_image_transformer_checkpoint_to_diffusers(checkpoint)
        return {name.removesuffix(".weight"): weight for name, weight in made.items()}
    checkpoint |= {f"{name}.bias": torch.zeros(len(weight)) for name, weight in weights.items()}
    made = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint | {"pos_embed": torch.zeros(1)})
    return {name.removesuffix(".weight"): weight for name, weight in made.items() if name.endswith(".weight")}


def repeat_outputs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Repeat each output row of a LoRA of Flux `_TIMES` times: Diffusers' converters expect Flux's own width."""
    ups = ("up.weight", ".lora_B.weight")
    return {
        name: tensor.repeat_interleave(_TIMES, dim=0)
        if name.endswith(ups) and not name.startswith(_OF_TEXT)
        else tensor.clone()
        for name, tensor in tensors.items()
    }


def unrepeat_outputs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `repeat_outputs` after conversion: keep one of every `_TIMES` repeated output rows."""
    return {
        name: tensor[::_TIMES] if name.endswith(".lora_B.weight") and not name.startswith(_OF_TEXT) else tensor
        for name, tensor in tensors.items()
    }


def diffusers_file(lora: TransformerLora, folder: Path) -> Path:
    """Write a file as Diffusers saves it today: PEFT's names, and the configurations in the metadata."""
    tensors: dict[str, Tensor] = {}
    for (component, path), (down, up) in lora.parts.items():
        tensors |= {f"{component}.{path}.lora_A.weight": down, f"{component}.{path}.lora_B.weight": up}
    components = dict.fromkeys(component for component, _ in lora.parts)
    fields = {f"{name}.{key}": value for name in components for key, value in _config(lora, name).items()}
    return save(tensors, folder / "diffusers.safetensors", {"lora_adapter_metadata": json.dumps(fields)})


def oldest_diffusers_file(lora: TransformerLora, folder: Path) -> Path:
    """Write a file in Diffusers' oldest layout, without alphas."""
    tensors: dict[str, Tensor] = {}
    for (component, path), (down, up) in lora.parts.items():
        name = f"{component}.{path}.{'lora' if component == TRANSFORMER else 'lora_linear_layer'}"
        tensors |= {f"{name}.down.weight": down, f"{name}.up.weight": up * lora.scale}
    return save(tensors, folder / "first.safetensors")


def peft_folder(lora: TransformerLora, folder: Path) -> Path:
    """Write one PEFT folder per component, and return their parent folder."""
    for component in dict.fromkeys(component for component, _ in lora.parts):
        tensors: dict[str, Tensor] = {}
        for path, (down, up) in ((path, part) for (of, path), part in lora.parts.items() if of == component):
            name = f"base_model.model.{path}"
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        (folder / "peft" / component).mkdir(parents=True)
        save(tensors, folder / "peft" / component / "adapter_model.safetensors")
        (folder / "peft" / component / "adapter_config.json").write_text(json.dumps(_config(lora, component)))
    return folder / "peft"


def _config(lora: TransformerLora, component: str) -> dict[str, object]:
    targets = [path for of, path in lora.parts if of == component]
    return {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}


def kohya_file(lora: TransformerLora, folder: Path) -> Path:
    """Write names of the authors' code with underscores. T5 is the third text encoder of every model."""
    modules = {f"lora_unet_{_flat(name)}": part for name, part in lora.originals.items()}
    return _trained(lora, modules, folder / "kohya.safetensors", t5="3")


def onetrainer_file(lora: TransformerLora, folder: Path) -> Path:
    """Write names of Diffusers with underscores."""
    modules = {f"lora_transformer_{_flat(path)}": part for (of, path), part in lora.parts.items() if of == TRANSFORMER}
    return _trained(lora, modules, folder / "onetrainer.safetensors")


def comfyui_file(lora: TransformerLora, folder: Path) -> Path:
    """Write names of the authors' code with dots."""
    modules = {f"diffusion_model.{name}": part for name, part in lora.originals.items()}
    for (component, path), part in lora.text.items():
        name = "t5xxl" if path.endswith(_T5_TARGETS) else _COMFYUI[component]
        modules[f"text_encoders.{name}.transformer.{_clip(path)}"] = part
    return save(_with_alphas(lora, modules), folder / "comfyui.safetensors")


def black_forest_file(lora: TransformerLora, folder: Path, start: str = "") -> Path:
    """Write names of Black Forest Labs' code with PEFT's factors, without alphas, and only for the transformer."""
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in lora.originals.items():
        tensors |= {f"{start}{name}.lora_A.weight": down, f"{start}{name}.lora_B.weight": up * lora.scale}
    return save(tensors, folder / "black_forest.safetensors")


def fal_file(lora: TransformerLora, folder: Path) -> Path:
    """Write the names of `black_forest_file` after PEFT's prefix, without PEFT's configuration."""
    return black_forest_file(lora, folder, "base_model.model.")


def _trained(lora: TransformerLora, modules: Mapping[str, Factors], path: Path, *, t5: str = "") -> Path:
    text = {
        f"lora_te{(t5 if name.endswith(_T5_TARGETS) else '') or component[13:] or 1}_{_flat(_clip(name))}": part
        for (component, name), part in lora.text.items()
    }
    return save(_with_alphas(lora, {**modules, **text}), path)


def _clip(path: str) -> str:
    """Return a path in a text encoder as trainers write it: CLIP's with the name of its module."""
    return path if path.endswith(_T5_TARGETS) else f"text_model.{path.removeprefix('text_model.')}"


def _with_alphas(lora: TransformerLora, modules: Mapping[str, Factors]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in modules.items():
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        tensors[f"{name}.alpha"] = torch.tensor(lora.alpha)
    return tensors


def _flat(path: str) -> str:
    return path.replace(".", "_")


LAYOUTS: Mapping[str, Callable[[TransformerLora, Path], Path]] = {
    "Diffusers": diffusers_file,
    "oldest names of Diffusers": oldest_diffusers_file,
    "PEFT": peft_folder,
    "kohya": kohya_file,
    "OneTrainer": onetrainer_file,
    "ComfyUI": comfyui_file,
    "Black Forest Labs": black_forest_file,
    "fal": fal_file,
}
"""Functions that write a file or a folder in each layout into a folder, and return its path."""
ONLY_FLUX = frozenset({"Black Forest Labs", "fal"})
"""Layouts that only trainers of Flux.1 write, and which have no text encoders."""
READ_BY_STOCK = frozenset({"Diffusers", "oldest names of Diffusers"})
"""Layouts that stock Diffusers reads for models of all widths; the oldest names not with Z-Image."""

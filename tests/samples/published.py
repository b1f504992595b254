"""Model folders, ControlNets and LoRA files in the layouts in which people publish them, with random weights.

Configurations come from `published_configs`. Names of tensors are those of published files; the installed Diffusers and
transformers write others. Everything is tiny unless the caller passes other `changes`; `changes={}` gives SDXL's sizes.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from bottega.miniature import WEIGHTS
from tests.samples import published_configs as configs
from tests.samples.published_configs import END, TINY, Config
from tests.support.shared_folders import written_once

State = dict[str, Tensor]
LoraLayout = Literal["kohya", "kohya_diffusers_names", "diffusers", "diffusers_old", "peft"]

# The ControlNets of `published_model`.
CONTROLNETS = ("canny", "depth")
# Of the decoder's output, so that nearly all pixels lie inside [-1, 1].
_PICTURE_STD = 0.4
# Second moment of SiLU(z), z standard normal: what a convolution behind GroupNorm and SiLU sees.
_SILU_MOMENT = 0.355


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the files of a folder are laid out."""

    variants: tuple[str, ...] = ("",)
    """Which copies of the weights there are: "" are float32 under the plain names, "fp16" are float16 in
    `*.fp16.safetensors`, "bf16" alike. SDXL has ("", "fp16")."""
    shards: int = 1
    """How many files the weights of the UNet and of each ControlNet are split into, with an index."""
    legacy_shard_names: bool = False
    """Shards of a variant are named `-00001-of-00002.fp16` as by Diffusers before 0.29, not `.fp16-00001-of-00002`."""
    old_vae_names: bool = False
    """The VAE's attention has `query`, `key`, `value` and `proj_attn`."""
    position_ids: bool = True
    """The text encoders have `text_model.embeddings.position_ids`, as files from transformers before 4.31."""
    text_prefix: bool = True
    """The first text encoder's tensors start with `text_model.`; published ones all do."""


PLAIN = Layout()


@functools.cache
def published_model(layout: Layout = PLAIN) -> Path:
    """Return a tiny model's folder in this layout, with ControlNets."""

    def write(folder: Path) -> None:
        write_model(folder / "sdxl", layout)
        for seed, name in enumerate(CONTROLNETS, start=1):
            write_controlnet(folder / "sdxl" / "controlnets" / name, layout, seed=seed)

    return written_once(f"published-{zlib.crc32(repr(layout).encode()):08x}", write) / "sdxl"


def write_model(
    folder: Path,
    layout: Layout = PLAIN,
    *,
    changes: Mapping[str, Config] = TINY,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an SDXL folder as its publishers do, without ControlNets, and return it.

    Args:
        folder: Need not exist.
        layout: How its files are laid out.
        changes: Keys to replace in the configuration of `unet`, `vae`, `text_encoder` and `text_encoder_2`.
        dtype: Of the plain weights, in which they are drawn; variants have their own.
    """
    config = {name: getattr(configs, name)() | changes.get(name, {}) for name in _BUILDERS if name != "controlnet"}
    for number, (name, values) in enumerate(config.items()):
        with _seeded(number, dtype):
            network = _BUILDERS[name](values)
        write_json(folder / name / "config.json", values)
        _write_weights(folder / name, _published_state(name, network, layout), layout, dtype)
    scheduler_config = configs.scheduler()
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler_config)
    write_tokenizers(folder)
    index = configs.model_index() | {"scheduler": ["diffusers", scheduler_config["_class_name"]]}
    return write_json(folder / "model_index.json", index).parent


def write_stable_diffusion(folder: Path, published: Mapping[str, Config], layout: Layout = PLAIN) -> Path:
    """Write a folder of Stable Diffusion as its publishers do, without ControlNets, and return it.

    Args:
        folder: Need not exist.
        published: Its configurations; see `stable_diffusion_configs`.
        layout: How its files are laid out.
    """
    for number, name in enumerate(("unet", "vae", "text_encoder")):
        with _seeded(number, torch.float32):
            network = _BUILDERS[name](published[name])
        write_json(folder / name / "config.json", published[name])
        _write_weights(folder / name, _published_state(name, network, layout), layout, torch.float32)
    write_json(folder / "scheduler" / "scheduler_config.json", published["scheduler"])
    _write_tokenizer(folder, "tokenizer", published["tokenizer"]["pad_token"])
    return write_json(folder / "model_index.json", published["index"]).parent


def write_controlnet(
    folder: Path,
    layout: Layout = PLAIN,
    *,
    changes: Config = TINY["controlnet"],
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a ControlNet's folder as its publishers do, with zero convolutions that are not zero, and return it.

    Args:
        folder: Need not exist.
        layout: How its files are laid out.
        changes: Keys to replace in its configuration.
        seed: Of the weights.
        dtype: Of the plain weights, in which they are drawn.
    """
    values = configs.controlnet() | changes
    with _seeded(1000 * seed + 500, dtype):
        network = _controlnet(values)
    write_json(folder / "config.json", values)
    _write_weights(folder, network.state_dict(), layout, dtype)
    return folder


def write_tokenizers(folder: Path) -> None:
    """Write both tokenizers as vocab.json and merges.txt, with the embedded model's vocabulary."""
    for name, pad_token in (("tokenizer", END), ("tokenizer_2", "!")):
        _write_tokenizer(folder, name, pad_token)


def _write_tokenizer(folder: Path, name: str, pad_token: str) -> None:
    model = json.loads((WEIGHTS / name / "tokenizer.json").read_text())["model"]
    for file, values in configs.tokenizer(pad_token).items():
        write_json(folder / name / file, values)
    write_json(folder / name / "vocab.json", model["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (folder / name / "merges.txt").write_text(f"#version: 0.2\n{merges}")


def write_lora(
    path: Path,
    layout: LoraLayout,
    components: Sequence[str] = ("unet", "text_encoder", "text_encoder_2"),
    *,
    model: Path | None = None,
    rank: int = 4,
    alpha: float = 2.0,
    strength: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write a LoRA for the attention layers of these components as a trainer would, and return its file or folder.

    Args:
        path: A file for one-file layouts, a folder with a folder for each component for "peft".
        layout: "kohya" has SGM's names of UNet blocks, as published files; "kohya_diffusers_names" has Diffusers'
            names with underscores. "diffusers_old" has no alphas, so that `alpha` is not used.
        components: Which parts it trains.
        model: A folder in the published layout, unsharded; the tiny one without it.
        rank: Of each pair of factors.
        alpha: The same for all modules.
        strength: Standard deviation of what it adds, in that of the weights, at scale 1.
        seed: Of the factors.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = 1.0 if layout == "diffusers_old" else alpha / rank
    tensors: dict[str, State] = {}
    for component in components:
        for module, shape in attention_shapes(model or published_model(), component).items():
            outputs, inputs = shape
            spread = strength / math.sqrt(3 * inputs) / scale / math.sqrt(rank)
            down = torch.randn(rank, inputs, generator=generator)
            up = torch.randn(outputs, rank, generator=generator) * spread
            tensors.setdefault(component, {}).update(_lora_names(layout, component, module, down, up, alpha))
    if layout == "peft":
        for component, state in tensors.items():
            _save(state, path / component / "adapter_model.safetensors")
            write_json(path / component / "adapter_config.json", _peft_config(rank, alpha, component))
        return path
    everything = {name: tensor for state in tensors.values() for name, tensor in state.items()}
    metadata = {"lora_adapter_metadata": _lora_metadata(components, rank, alpha)} if layout == "diffusers" else {}
    return _save(everything, path, {"format": "pt"} | metadata)


def attention_shapes(folder: Path, component: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights of a component's attention projections, by the path in published names."""
    shapes = {}
    for file in sorted((folder / component).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module.endswith(_PROJECTIONS) and "attn" in module:
                    outputs, inputs = opened.get_slice(name).get_shape()
                    shapes[module] = (outputs, inputs)
    return shapes


def write_json(path: Path, values: Config) -> Path:
    """Write a JSON file as Diffusers does, with the folders that lead to it, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")
    return path


def _unet(values: Config) -> Any:
    network: Any = UNet2DConditionModel.from_config(values)
    _give_output(network.conv_out, std=1.0)
    return network


def _vae(values: Config) -> Any:
    network: Any = AutoencoderKL.from_config(values)
    _give_output(network.decoder.conv_out, std=_PICTURE_STD)
    return network


def _controlnet(values: Config) -> Any:
    network: Any = ControlNetModel.from_config(values)
    for convolution in (*network.controlnet_down_blocks, network.controlnet_mid_block):
        nn.init.normal_(convolution.weight, std=0.05)
    for module in network.controlnet_cond_embedding.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return network


def _text_encoder(kind: type[Any]) -> Callable[[Config], nn.Module]:
    def build(values: Config) -> nn.Module:
        network: nn.Module = kind(CLIPTextConfig(**values))
        return network

    return build


_BUILDERS: Mapping[str, Callable[[Config], Any]] = {
    "unet": _unet,
    "vae": _vae,
    "text_encoder": _text_encoder(CLIPTextModel),
    "text_encoder_2": _text_encoder(CLIPTextModelWithProjection),
}
_OLD_VAE_NAMES = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")
_TEXT_PREFIX = "text_model."


def _published_state(component: str, network: nn.Module, layout: Layout) -> State:
    """Return its tensors under the names of published files."""
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith("position_ids")}
    if component.startswith("text_encoder"):
        inner = {name.removeprefix(_TEXT_PREFIX): tensor for name, tensor in state.items()}
        prefix = _TEXT_PREFIX if layout.text_prefix or component == "text_encoder_2" else ""
        if layout.position_ids:
            inner["embeddings.position_ids"] = torch.arange(len(inner["embeddings.position_embedding.weight"]))[None]
        projection = "text_projection.weight"
        return {name if name == projection else prefix + name: tensor for name, tensor in inner.items()}
    if component == "vae" and layout.old_vae_names:
        return {_old_vae_name(name): tensor for name, tensor in state.items()}
    return state


def _old_vae_name(name: str) -> str:
    if ".attentions." not in name:
        return name
    for new, old in _OLD_VAE_NAMES.items():
        name = name.replace(f".{new}.", f".{old}.")
    return name


_VARIANTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _write_weights(folder: Path, state: State, layout: Layout, dtype: torch.dtype) -> None:
    """Write each variant of the weights, whole or in shards: text encoders are never sharded."""
    stem = "model" if "text_model" in next(iter(state)) else "diffusion_pytorch_model"
    stem = "model" if folder.name.startswith("text_encoder") else stem
    shards = layout.shards if folder.name not in {"vae", "text_encoder", "text_encoder_2"} else 1
    for variant in layout.variants:
        cast = {name: _cast(tensor, _VARIANTS.get(variant, dtype)) for name, tensor in state.items()}
        if shards == 1:
            _save(cast, folder / (f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"))
            continue
        _write_shards(folder, stem, cast, variant, layout)


def _write_shards(folder: Path, stem: str, state: State, variant: str, layout: Layout) -> None:
    weight_map: dict[str, str] = {}
    names = list(state)
    for number in range(layout.shards):
        held = names[number :: layout.shards]
        part = f"-{number + 1:05d}-of-{layout.shards:05d}"
        middle = f"{part}.{variant}" if layout.legacy_shard_names else f".{variant}{part}"
        file = f"{stem}{middle if variant else part}.safetensors"
        _save({name: state[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json", index)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _save(state: State, path: Path, metadata: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, dict(metadata or {"format": "pt"}))
    return path


def _lora_names(layout: LoraLayout, component: str, module: str, down: Tensor, up: Tensor, alpha: float) -> State:
    """Return one module's tensors under a trainer's names."""
    if layout in {"kohya", "kohya_diffusers_names"}:
        prefix = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}[component]
        path = _sgm_path(module) if layout == "kohya" and component == "unet" else module
        name = f"{prefix}_{path.replace('.', '_')}"
        return {f"{name}.alpha": torch.tensor(alpha), f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    if layout == "peft":
        name = f"base_model.model.{module}"
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    if layout == "diffusers":
        name = f"{component}.{module}"
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    name = f"{component}.{module}" + ("" if component == "unet" else ".lora_linear_layer")
    factors = ("lora.down", "lora.up") if component == "unet" else ("down", "up")
    return {f"{name}.{factors[0]}.weight": down, f"{name}.{factors[1]}.weight": up}


def _sgm_path(module: str) -> str:
    """Return a UNet module's path with the block names of Stability's code, which kohya's trainer writes for SDXL.

    A level has two layers and a resampler on the way down, three layers on the way up.
    """
    kind, *rest = module.split(".")
    if kind == "mid_block":
        return ".".join(["middle_block", str(1 if rest[0] == "attentions" else 2 * int(rest[1])), *rest[2:]])
    level, branch, layer, *inner = rest
    place = str(int(branch == "attentions"))
    if kind == "down_blocks":
        return ".".join(["input_blocks", str(1 + 3 * int(level) + int(layer)), place, *inner])
    return ".".join(["output_blocks", str(3 * int(level) + int(layer)), place, *inner])


def _targets(component: str) -> list[str]:
    return list(_PROJECTIONS[:4] if component == "unet" else _PROJECTIONS[4:])


def _peft_config(rank: int, alpha: float, component: str) -> Config:
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": _targets(component),
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _lora_metadata(components: Sequence[str], rank: int, alpha: float) -> str:
    """Return Diffusers' metadata of a LoRA file: each component's PEFT configuration, flat, with prefixes."""
    flat = {f"{part}.{key}": value for part in components for key, value in _peft_config(rank, alpha, part).items()}
    return json.dumps(flat, indent=2, sort_keys=True)


def _give_output(convolution: nn.Conv2d, *, std: float) -> None:
    """Redraw a last convolution so that its output has this standard deviation, whatever its width."""
    assert convolution.bias is not None
    inputs = convolution.in_channels * convolution.kernel_size[0] * convolution.kernel_size[1]
    nn.init.normal_(convolution.weight, std=std / (inputs * _SILU_MOMENT) ** 0.5)
    nn.init.zeros_(convolution.bias)


@contextmanager
def _seeded(seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Make weights in this element type and draw the CPU's random numbers from a seed for the block.

    SDXL's weights in float32 would take 14 GB.
    """
    before, before_dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    torch.default_generator.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.random.set_rng_state(before)
        torch.set_default_dtype(before_dtype)

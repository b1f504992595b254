"""The modules of a base model that LoRAs can change, with their shapes. Reads headers, not weights.

kohya's trainer uses the names that SDXL's UNet and Stable Diffusion 3's transformer have in Stability's code, and
Diffusers' names for other UNets. Positions in the UNet follow from its configuration. The transformer's modules there
may be several of Diffusers', such as the projections of queries, keys and values.

Sources: sgm's OpenAIModel (input_blocks, middle_block, output_blocks) and Diffusers' UNet2DConditionModel; MMDiTX of
Stability's code for Stable Diffusion 3, and Diffusers' conversion of its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bottega.addons.loras.wire.canonical import spellings
from bottega.addons.loras.wire.module_parts import COMPONENTS
from bottega.errors import BadLora, ConfigError
from bottega.model_files.family_names import SD3, TRANSFORMER, UNET, class_of
from bottega.model_files.field_rules import with_defaults
from bottega.model_files.transformer_rules import SD3_RULES
from bottega.safetensors_header import Header, read_header

# Names of a module in Stability's code, by its name in Diffusers.
_RESNET = {
    "norm1": "in_layers_0",
    "conv1": "in_layers_2",
    "time_emb_proj": "emb_layers_1",
    "norm2": "out_layers_0",
    "conv2": "out_layers_3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "conv_in": "input_blocks_0_0",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
    "conv_norm_out": "out_0",
    "conv_out": "out_2",
}
# Modules of one transformer block, which have the same names in both.
_BLOCK = (
    *(f"attn{place}.{name}" for place in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
    *(f"norm{place}" for place in (1, 2, 3)),
)
_CROSS = "CrossAttn"
# Modules outside of the blocks of Stable Diffusion 3's transformer, by their names in Stability's code.
_SD3_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "context_embedder": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
# The same of one of its blocks.
_SD3_BLOCK = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}

_WEIGHT, _BIAS = ".weight", ".bias"
# Not supported: embedding tables are looked up by row instead of multiplied, so a LoRA cannot be added.
_TABLES = ("token_embedding", "position_embedding", "shared", "embed_tokens", "relative_attention_bias")
_TOKENS = "token_embedding.weight"
_SD3 = class_of(TRANSFORMER, SD3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Outputs of a module of Stability's code that are a module of their own in Diffusers' network."""

    path: str
    rows: tuple[tuple[int, int], ...]
    """Ranges of these outputs, in the order in which Diffusers' module has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModule:
    """A linear layer, a convolution or a normalisation layer of a base model, in Diffusers' network or Stability's."""

    component: str
    path: str
    shape: tuple[int, ...]
    """Shape of its weight, [out, in] or [out, in, height, width]; [channels] of a normalisation layer."""
    has_bias: bool = False
    pieces: tuple[Piece, ...] = ()
    """What it is in Diffusers' network; empty if it is the same module there."""

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation layer."""
        return len(self.shape) == 1

    @property
    def name(self) -> str:
        """Component and path, for messages to users."""
        return f"{self.component}.{self.path}"


class Base:
    """The modules of a base model, found by the names that LoRA files use for them.

    Args:
        modules: The modules.
        denoiser: See the attribute.
        stability: Paths in the denoising network, by their names in Stability's code, with dots or with underscores in
            place of dots. Modules of several paths have their outputs one after the other.
        swapped: Paths of modules that have the two halves of their outputs in the other order there.
        token_widths: See the attribute.
    """

    def __init__(
        self,
        modules: Iterable[BaseModule],
        *,
        denoiser: str = UNET,
        stability: Mapping[str, Sequence[str]],
        swapped: Sequence[str] = (),
        token_widths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.denoiser = denoiser
        """Component of the denoising network."""
        self.token_widths = token_widths
        """Number of values that a token's vector has, for each text encoder of CLIP; empty if none reads embeddings."""
        self._dotted: dict[tuple[str, str], BaseModule] = {}
        self._flat: dict[tuple[str, str], BaseModule | None] = {}
        for module in modules:
            for path in spellings(module.component, module.path):
                self._dotted[module.component, path] = module
                flat = (module.component, path.replace(".", "_"))
                # If two modules have the same flat name, it is ambiguous and finds neither.
                self._flat[flat] = module if self._flat.get(flat, module) is module else None
        for name, paths in stability.items():
            parts = [found for path in paths if (found := self._dotted.get((denoiser, path))) is not None]
            if len(parts) == len(paths):
                whole = parts[0] if len(parts) == 1 and paths[0] not in swapped else _joined(name, parts, swapped)
                self._flat[denoiser, name.replace(".", "_")] = self._dotted[denoiser, name] = whole

    def find(self, component: str, path: str) -> BaseModule | None:
        """Return the module at a path with dots, or None."""
        return self._dotted.get((component, path))

    def find_flat(self, component: str, name: str) -> BaseModule | None:
        """Return the module at a path with underscores in place of dots, or None."""
        return self._flat.get((component, name))


def _joined(name: str, parts: Sequence[BaseModule], swapped: Sequence[str]) -> BaseModule:
    """Return a module of Stability's code that has the outputs of these modules, one after the other."""
    pieces, end = list[Piece](), 0
    for part in parts:
        begin, end = end, end + part.shape[0]
        middle = (begin + end) // 2
        rows = ((middle, end), (begin, middle)) if part.path in swapped else ((begin, end),)
        pieces.append(Piece(path=part.path, rows=rows))
    return replace(parts[0], path=name, shape=(end, *parts[0].shape[1:]), pieces=tuple(pieces))


def read_base(folder: Path) -> Base:
    """Read the base model in a folder of Diffusers' layout. Raises ConfigError if the folder is not a model."""
    try:
        denoiser = TRANSFORMER if (folder / TRANSFORMER).is_dir() else UNET
        config = dict(json.loads((folder / denoiser / "config.json").read_text(encoding="utf-8")))
        widths = {
            component: entry.shape[1]
            for component, header in _headers(folder)
            for entry in header.tensors
            if entry.name.endswith(_TOKENS) and len(entry.shape) == 2
        }
        modules, stability, swapped = list(_modules(folder)), dict[str, Sequence[str]](), list[str]()
        if denoiser == UNET:
            stability = {name: (path,) for name, path in sgm_names(config).items()}
        elif config.get("_class_name") == _SD3:
            blocks = int(with_defaults(SD3_RULES, config)["num_layers"])
            stability, widths = sd3_names(blocks), {}
            swapped = ["norm_out.linear", f"transformer_blocks.{blocks - 1}.norm1_context.linear"]
        return Base(modules, denoiser=denoiser, stability=stability, swapped=swapped, token_widths=widths)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BadLora) as error:
        raise ConfigError(f"base model {folder} cannot be used: {error}") from None


def _modules(folder: Path) -> Iterator[BaseModule]:
    """Yield each module once. A component may have several files, or the same modules in several data types."""
    seen: set[tuple[str, str]] = set()
    headers = list(_headers(folder))
    tensors = {(component, entry.name) for component, header in headers for entry in header.tensors}
    for component, header in headers:
        for entry in header.tensors:
            module = entry.name.removesuffix(_WEIGHT)
            if module == entry.name or len(entry.shape) not in {1, 2, 4} or module.rpartition(".")[2] in _TABLES:
                continue
            has_bias = (component, f"{module}{_BIAS}") in tensors
            if len(entry.shape) == 1 and not has_bias:
                continue  # A norm of the root mean square, such as those of queries and keys. It cannot be changed.
            if any((component, path) in seen for path in spellings(component, module)):
                continue
            seen.add((component, module))
            yield BaseModule(component=component, path=module, shape=entry.shape, has_bias=has_bias)


def _headers(folder: Path) -> Iterator[tuple[str, Header]]:
    """Yield the headers of a model's files, each with its component."""
    for component in COMPONENTS:
        for path in sorted((folder / component).glob("*.safetensors")):
            with path.open("rb") as file:
                yield component, read_header(file)


def sgm_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules' paths in Diffusers, by their names in Stability's code with underscores in place of dots.

    Some of the modules may not exist. Raises KeyError, TypeError or ValueError for an invalid configuration.

    Args:
        config: Diffusers' configuration of the UNet.
    """
    names = {name: path for path, name in _OUTSIDE.items()}
    for theirs, ours, is_resnet, depth in _places(config):
        names.update(_resnet(theirs, ours) if is_resnet else _transformer(theirs, ours, depth))
    names.update(_samplers(config))
    return names


def sd3_names(blocks: int) -> dict[str, Sequence[str]]:
    """Return paths in Diffusers' transformer of Stable Diffusion 3, by their names in Stability's code.

    Some of the modules may not exist.

    Args:
        blocks: Number of joint blocks.
    """
    names: dict[str, Sequence[str]] = {name: (path,) for name, path in _SD3_OUTSIDE.items()}
    for number in range(blocks):
        for name, paths in _SD3_BLOCK.items():
            names[f"joint_blocks.{number}.{name}"] = [f"transformer_blocks.{number}.{path}" for path in paths]
    return names


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, int]]:
    """Yield each resnet and transformer: its names in both codes, whether it is a resnet, and a transformer's depth."""
    levels = len(config["block_out_channels"])
    layers = int(config["layers_per_block"])
    down = _by_level(config.get("transformer_layers_per_block", 1), levels)
    up = config.get("reverse_transformer_layers_per_block") or down[::-1]
    for level, kind in enumerate(config["down_block_types"]):
        for layer in range(layers):
            at = f"input_blocks_{1 + level * (layers + 1) + layer}"
            yield f"{at}_0", f"down_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"down_blocks.{level}.attentions.{layer}", False, _depth(down[level], layer)
    yield "middle_block_0", "mid_block.resnets.0", True, 0
    yield "middle_block_1", "mid_block.attentions.0", False, _depth(down[-1], 0)
    yield "middle_block_2", "mid_block.resnets.1", True, 0
    for level, kind in enumerate(config["up_block_types"]):
        for layer in range(layers + 1):
            at = f"output_blocks_{level * (layers + 1) + layer}"
            yield f"{at}_0", f"up_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"up_blocks.{level}.attentions.{layer}", False, _depth(up[level], layer)


def _samplers(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    levels = len(config["block_out_channels"])
    layers = int(config["layers_per_block"])
    for level in range(levels - 1):
        yield f"input_blocks_{(level + 1) * (layers + 1)}_0_op", f"down_blocks.{level}.downsamplers.0.conv"
        place = 2 if _CROSS in config["up_block_types"][level] else 1
        yield f"output_blocks_{level * (layers + 1) + layers}_{place}_conv", f"up_blocks.{level}.upsamplers.0.conv"


def _resnet(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}_{name}": f"{ours}.{path}" for path, name in _RESNET.items()}


def _transformer(theirs: str, ours: str, depth: int) -> dict[str, str]:
    paths = [
        "norm",
        "proj_in",
        "proj_out",
        *(f"transformer_blocks.{n}.{path}" for n in range(depth) for path in _BLOCK),
    ]
    return {f"{theirs}_{path.replace('.', '_')}": f"{ours}.{path}" for path in paths}


def _by_level(depth: Any, levels: int) -> list[Any]:
    return [depth] * levels if isinstance(depth, int) else list(depth)


def _depth(level: Any, layer: int) -> int:
    """Return the depth of one layer's transformer. Pruned models have a list with the depths of a level's layers."""
    return int(level if isinstance(level, int) else level[layer])

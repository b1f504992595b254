"""Reads a ControlNet's untrusted config.json: every number is checked against its bounds before it is used.

Defaults are those of Diffusers, and a field may be null if Diffusers' network accepts that. A field that the suite does
not implement must have its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import pydantic_core
from pydantic import ConfigDict, Field, TypeAdapter

from bottega.adapter_rules import MAX_MODES
from bottega.errors import InvalidRequest, Violation
from bottega.model_files.field_rules import NULL, OFF, FieldRule, broken_fields, only
from bottega.model_files.unet_rules import TIME_IDS
from bottega.plain_text import excerpt
from bottega.rules import MAX_SIDE

FILE = "config.json"
# Real files have 2 KB.
MAX_CONFIG_BYTES = 64 << 10
TEXT_TIME = "text_time"
# Transformer blocks in all; SDXL's ControlNets have 34. Each takes dozens of objects even without weights.
_MAX_BLOCKS = 256
_MAX_VIOLATIONS = 8
_SHOWN_CHARACTERS = 60

_LABELS, _PROJECTS = "it needs class labels", "it projects the prompt's embeddings"
_NOT_IMPLEMENTED = (
    FieldRule(
        name="_class_name",
        default="ControlNetModel",
        values=only("ControlNetModel", "ControlNetUnionModel", "SD3ControlNetModel", "FluxControlNetModel"),
        why="it is another kind of network",
    ),
    FieldRule(
        name="extra_conditioning_channels",
        default=0,
        values=only(0, None),
        why="it is for inpainting, and reads a mask beside its image",
    ),
    FieldRule(
        name="conditioning_embedding_channels",
        default=None,
        values=NULL,
        why="it reads pixels of its image, as XLabs' do, instead of latents",
    ),
    FieldRule(name="conditioning_channels", default=3, values=only(3), why="its control images are not RGB"),
    FieldRule(name="class_embed_type", default=None, values=NULL, why=_LABELS),
    FieldRule(name="num_class_embeds", default=None, values=NULL, why=_LABELS),
    FieldRule(name="encoder_hid_dim", default=None, values=NULL, why=_PROJECTS),
    FieldRule(name="encoder_hid_dim_type", default=None, values=NULL, why=_PROJECTS),
    FieldRule(
        name="global_pool_conditions", default=False, values=OFF, why="it averages its residuals over the picture"
    ),
)

# Bounds are several times SDXL's values.
_Channels = Annotated[int, Field(ge=1, le=8192)]
_MAX_WIDTH = 65_536
_Width = Annotated[int, Field(ge=1, le=_MAX_WIDTH)]
_Layers = Annotated[int, Field(ge=1, le=16)]
_Depth = Annotated[int, Field(ge=0, le=64)]
_Heads = Annotated[int, Field(ge=1, le=1024)]
_Groups = Annotated[int, Field(ge=1, le=1024)]
_Factor = Annotated[float, Field(ge=-1000, le=1000)]
_Axis = Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
_Epsilon = Annotated[float, Field(ge=0, le=1)]
_DownBlock = Literal["CrossAttnDownBlock2D", "DownBlock2D"]
# One entry per level of the encoder: four in Stable Diffusion, three in SDXL.
_Levels = Field(min_length=1, max_length=8)
_LayerDepths = Annotated[tuple[_Depth, ...], Field(min_length=1, max_length=16)]
_Depths = Annotated[tuple[_Depth | _LayerDepths, ...], _Levels]
_EmbeddingChannels = Annotated[tuple[_Channels, ...], Field(min_length=2, max_length=8)]
# ControlNetModel's defaults, which are those of Stable Diffusion 1.
_CROSS: _DownBlock = "CrossAttnDownBlock2D"
_DOWN_BLOCKS: tuple[_DownBlock, ...] = (_CROSS, _CROSS, _CROSS, "DownBlock2D")
_EMBEDDING = (16, 32, 96, 256)
_UNION_EMBEDDING = (48, 96, 192, 384)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """The arguments of a ControlNet class of Diffusers, with the names and defaults of that class."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def modes(self) -> int:
        """Number of control modes; 0 if the network is not a union."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(_Arguments):
    """The arguments of ControlNetModel."""

    in_channels: Annotated[int, Field(ge=1, le=256)] = 4
    conditioning_channels: Literal[3] = 3
    # Null is false, as in Diffusers; published SDXL ControlNets have upcast_attention null.
    flip_sin_to_cos: bool | None = True
    freq_shift: Annotated[int, Field(ge=0, le=1)] = 0
    down_block_types: Annotated[tuple[_DownBlock, ...], _Levels] = _DOWN_BLOCKS
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] = "UNetMidBlock2DCrossAttn"
    only_cross_attention: bool | Annotated[tuple[bool, ...], _Levels] = False
    block_out_channels: Annotated[tuple[_Channels, ...], _Levels] = (320, 640, 1280, 1280)
    layers_per_block: _Layers = 2
    downsample_padding: Annotated[int, Field(ge=0, le=1)] = 1
    mid_block_scale_factor: _Factor = 1.0
    act_fn: Literal["gelu", "mish", "relu", "silu", "swish"] = "silu"
    norm_num_groups: _Groups = 32
    norm_eps: _Epsilon = 1e-5
    cross_attention_dim: _Width = 1280
    transformer_layers_per_block: _Depth | _Depths = 1
    attention_head_dim: _Heads | Annotated[tuple[_Heads, ...], _Levels] = 8
    num_attention_heads: _Heads | Annotated[tuple[_Heads, ...], _Levels] | None = None
    use_linear_projection: bool | None = False
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: _Channels | None = None
    upcast_attention: bool | None = False
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    projection_class_embeddings_input_dim: _Width | None = None
    controlnet_conditioning_channel_order: Literal["rgb", "bgr"] = "rgb"
    conditioning_embedding_out_channels: _EmbeddingChannels = _EMBEDDING

    @property
    def pooled_width(self) -> int:
        """Width of the pooled prompt embeddings; 0 if the conditions are not SDXL's."""
        if self.addition_embed_type != TEXT_TIME:
            return 0
        return (self.projection_class_embeddings_input_dim or 0) - TIME_IDS * (self.addition_time_embed_dim or 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnionConfig(NetworkConfig):
    """The arguments of ControlNetUnionModel, the class of unions for SDXL."""

    addition_embed_type: Literal["text_time"]
    mid_block_type: Literal["UNetMidBlock2DCrossAttn"] = "UNetMidBlock2DCrossAttn"
    controlnet_conditioning_channel_order: Literal["rgb"] = "rgb"
    conditioning_embedding_out_channels: _EmbeddingChannels = _UNION_EMBEDDING
    num_control_type: Annotated[int, Field(ge=1, le=MAX_MODES)] = 6
    num_trans_channel: _Channels = 320
    num_trans_head: _Heads = 8
    num_trans_layer: _Layers = 1
    num_proj_channel: _Channels = 320

    @property
    def fields(self) -> dict[str, Any]:
        """Arguments for ControlNetUnionModel, whose middle block always has cross-attention."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["mid_block_type"]
        return fields

    @property
    def modes(self) -> int:
        """Number of control modes."""
        return self.num_control_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sd3NetworkConfig(_Arguments):
    """The arguments of SD3ControlNetModel."""

    sample_size: Annotated[int, Field(ge=1, le=MAX_SIDE)] = 128
    patch_size: Annotated[int, Field(ge=1, le=16)] = 2
    in_channels: Annotated[int, Field(ge=1, le=256)] = 16
    num_layers: Annotated[int, Field(ge=1, le=_MAX_BLOCKS)] = 18
    attention_head_dim: _Heads = 64
    num_attention_heads: _Heads = 18
    joint_attention_dim: _Width | None = 4096
    """Width of the prompt's embeddings; None if the network does not read the prompt, as those of SD 3.5 Large."""
    caption_projection_dim: _Width = 1152
    pooled_projection_dim: _Width = 2048
    out_channels: Annotated[int, Field(ge=1, le=256)] | None = 16
    pos_embed_max_size: Annotated[int, Field(ge=1, le=1024)] | None = 96
    dual_attention_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=_MAX_BLOCKS)] = ()
    qk_norm: Literal["rms_norm"] | None = None
    pos_embed_type: Literal["sincos"] | None = "sincos"
    use_pos_embed: bool = True
    """Whether it embeds latents itself; if not, it reads them as the model's transformer embeds them."""
    force_zeros_for_pooled_projection: bool = True
    """Whether it reads zeros in place of the pooled prompt embeddings, and latents of its image without the shift."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FluxNetworkConfig(_Arguments):
    """The arguments of FluxControlNetModel."""

    patch_size: Literal[1] = 1
    in_channels: Annotated[int, Field(ge=4, le=1024, multiple_of=4)] = 64
    """Channels of a token: four times the channels of the latent, because a token is a patch of 2x2 elements."""
    num_layers: Annotated[int, Field(ge=0, le=_MAX_BLOCKS)] = 19
    num_single_layers: Annotated[int, Field(ge=0, le=_MAX_BLOCKS)] = 38
    attention_head_dim: Annotated[int, Field(ge=6, le=1024)] = 128
    num_attention_heads: _Heads = 24
    joint_attention_dim: _Width = 4096
    pooled_projection_dim: _Width = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[_Axis, _Axis, _Axis] = (16, 56, 56)
    num_mode: Annotated[int, Field(ge=1, le=MAX_MODES)] | None = None

    @property
    def modes(self) -> int:
        """Number of control modes."""
        return self.num_mode or 0


AnyNetworkConfig = NetworkConfig | Sd3NetworkConfig | FluxNetworkConfig
"""The configuration of a ControlNet for a UNet, or for the transformer of Stable Diffusion 3 or Flux.1."""


def _adapter_of(text: bytes) -> TypeAdapter[AnyNetworkConfig]:
    """Return what reads a configuration. Some published unions call themselves ControlNetModel."""
    try:
        fields = pydantic_core.from_json(text)
    except ValueError:
        return _CONFIG
    if not isinstance(fields, dict):
        return _CONFIG
    name = str(fields.get("_class_name"))
    if name in _OF_TRANSFORMERS:
        return _OF_TRANSFORMERS[name]
    return _UNION if name == "ControlNetUnionModel" or fields.get("num_control_type") is not None else _CONFIG


def read_fields(text: bytes) -> Mapping[str, object]:
    """Return all fields of a config.json without checking their values.

    Raises:
        InvalidRequest: The text is no JSON object.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise _refused([("", f"has over {MAX_CONFIG_BYTES} bytes")])
    try:
        fields = pydantic_core.from_json(text, allow_inf_nan=False)  # limits the depth of nesting
    except ValueError as error:
        raise _refused([("", f"is no JSON: {excerpt(str(error), _SHOWN_CHARACTERS)}")]) from None
    if not isinstance(fields, dict):
        raise _refused([("", "is no configuration")])
    return fields


def not_served(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field whose value the suite does not implement.

    As in Diffusers, a missing `_class_name` means ControlNetModel.
    """
    for sentence in broken_fields(_NOT_IMPLEMENTED, fields):
        yield f"{FILE}: {sentence}"


def read_network_config(text: bytes) -> AnyNetworkConfig:
    """Return the checked contents of a config.json.

    Raises:
        InvalidRequest: Fields are out of bounds; the error names each.
    """
    try:
        config = _adapter_of(text).validate_json(text)
    except pydantic.ValidationError as error:
        raise _refused(_deepest(error)) from None
    broken = _broken(config) if isinstance(config, NetworkConfig) else _broken_transformer(config)
    if found := list(broken):
        raise _refused(found)
    return config


def _broken_transformer(config: Sd3NetworkConfig | FluxNetworkConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of a field and the broken rule, for each broken rule between fields."""
    width = config.attention_head_dim * config.num_attention_heads
    if width > _MAX_WIDTH:
        yield "num_attention_heads", f"times attention_head_dim must be at most {_MAX_WIDTH}"
    yield from _broken_sd3(config, width) if isinstance(config, Sd3NetworkConfig) else _broken_flux(config)


def _broken_flux(config: FluxNetworkConfig) -> Iterator[tuple[str, str]]:
    if not 1 <= (blocks := config.num_layers + config.num_single_layers) <= _MAX_BLOCKS:
        yield "num_layers", f"plus num_single_layers must be 1 to {_MAX_BLOCKS}, not {blocks}"
    if (sizes := sum(config.axes_dims_rope)) != config.attention_head_dim:
        yield "attention_head_dim", f"must be {sizes}, the sum of axes_dims_rope, not {config.attention_head_dim}"


def _broken_sd3(config: Sd3NetworkConfig, width: int) -> Iterator[tuple[str, str]]:
    if config.joint_attention_dim is not None and config.caption_projection_dim != width:
        yield "caption_projection_dim", f"must be {width}, attention_head_dim times num_attention_heads"
    if width % 4:
        yield "num_attention_heads", "times attention_head_dim must be a multiple of 4, for the embeddings of positions"
    if any(layer >= config.num_layers for layer in config.dual_attention_layers):
        yield "dual_attention_layers", f"must be below num_layers ({config.num_layers})"
    if config.use_pos_embed and (config.pos_embed_type is None or config.pos_embed_max_size is None):
        yield "pos_embed_type", "must be sincos, with a pos_embed_max_size, unless use_pos_embed is false"
    if config.sample_size % config.patch_size:
        yield "sample_size", f"must be a multiple of patch_size ({config.patch_size})"
    elif (places := config.sample_size // config.patch_size) > (config.pos_embed_max_size or places):
        yield "pos_embed_max_size", f"must be at least {places}, sample_size divided by patch_size"


def _broken(config: NetworkConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of a field and the broken rule, for each broken rule between fields."""
    levels = len(config.block_out_channels)
    for name in _BY_LEVEL:
        value = getattr(config, name)
        if isinstance(value, tuple) and len(value) != levels:
            yield name, f"must have {levels} entries, as block_out_channels has, not {len(value)}"
    if (blocks := _blocks(config)) > _MAX_BLOCKS:
        yield "transformer_layers_per_block", f"must come to at most {_MAX_BLOCKS} in all layers, not {blocks}"
    for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim"):
        if config.addition_embed_type == TEXT_TIME and getattr(config, name) is None:
            yield name, f"must be there with addition_embed_type {TEXT_TIME}"
    for name in ("attention_head_dim", "num_attention_heads"):
        heads = getattr(config, name)
        each = heads if isinstance(heads, tuple) else (heads or 1,) * levels
        if any(most < count for count, most in zip(each, config.block_out_channels, strict=False)):
            yield name, "must be at most the channels of its level"
    if uneven := [width for width in config.block_out_channels if width % config.norm_num_groups]:
        yield "norm_num_groups", f"must divide every entry of block_out_channels, also {uneven[0]}"
    if config.pooled_width < 0:
        yield "projection_class_embeddings_input_dim", f"must be at least {TIME_IDS} times addition_time_embed_dim"
    if isinstance(config, UnionConfig):
        yield from _broken_union(config)


def _broken_union(config: UnionConfig) -> Iterator[tuple[str, str]]:
    for name in ("num_trans_channel", "num_proj_channel"):
        if (value := getattr(config, name)) != (width := config.block_out_channels[0]):
            yield name, f"must be {width}, the first entry of block_out_channels, not {value}"
    if config.num_trans_channel % config.num_trans_head:
        yield "num_trans_head", f"must divide num_trans_channel, {config.num_trans_channel}"


def _blocks(config: NetworkConfig) -> int:
    """Return an upper bound of the number of transformer blocks."""
    depths = config.transformer_layers_per_block
    each = depths if isinstance(depths, tuple) else (depths,) * len(config.block_out_channels)
    per_level = [sum(depth) if isinstance(depth, tuple) else depth * config.layers_per_block for depth in each]
    return sum(per_level) + per_level[-1]


def _deepest(error: pydantic.ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the name and the error of each wrong field; for a union, only the error deepest inside the value."""
    found: dict[str, Any] = {}
    for detail in error.errors(include_url=False, include_context=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if name not in found or len(detail["loc"]) > len(found[name]["loc"]):
            found[name] = detail
    for name, detail in found.items():
        at = "".join(f"[{part}]" for part in detail["loc"][1:] if isinstance(part, int))
        rule = detail["msg"][:1].lower() + detail["msg"][1:].replace("Input should", "must")
        value = detail["input"]
        actual = (
            f", not {excerpt(repr(value), _SHOWN_CHARACTERS)}" if isinstance(value, str | int | float | None) else ""
        )
        yield f"{name}{at}", rule.replace("input should", "must") + actual


def _refused(broken: Iterable[tuple[str, str]]) -> InvalidRequest:
    """Return an InvalidRequest whose violations, all of the field `folder`, are the broken rules."""
    texts = [f"{FILE}: {f'{name}: ' if name else ''}{rule}" for name, rule in broken]
    violations = [Violation(field="folder", description=text) for text in texts[:_MAX_VIOLATIONS]]
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return InvalidRequest(texts[0] + more, violations=violations)


_BY_LEVEL = (
    "down_block_types",
    "transformer_layers_per_block",
    "attention_head_dim",
    "num_attention_heads",
    "only_cross_attention",
)
_CONFIG: TypeAdapter[AnyNetworkConfig] = TypeAdapter(NetworkConfig)
_UNION: TypeAdapter[AnyNetworkConfig] = TypeAdapter(UnionConfig)
_OF_TRANSFORMERS: Mapping[object, TypeAdapter[AnyNetworkConfig]] = {
    "SD3ControlNetModel": TypeAdapter(Sd3NetworkConfig),
    "FluxControlNetModel": TypeAdapter(FluxNetworkConfig),
}

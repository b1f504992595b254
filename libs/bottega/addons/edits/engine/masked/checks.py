"""Checks of masked rows: which networks they can be computed with, and what of a recording depends on its prompt.

An edit reuses activations outside its mask that were computed with another prompt. That is right only if they hardly
depend on the prompt. InstGenIE (2025) reports this for its models; here each model is measured once, on its first
template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from diffusers import FluxTransformer2DModel, ModelMixin, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusers.models.unets.unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.edits.engine.masked.joint import joint_paths
from bottega.addons.edits.engine.masked.tokens import MaskTokens, pack_rows, patch_size
from bottega.addons.edits.engine.sparse.pieces import Rectangle, Tiles
from bottega.engine.acceleration.acceleration import Probe
from bottega.engine.encode import Conditions, encode_prompts
from bottega.engine.forward import stack
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row

_DOWN, _MIDDLE, _UP = (CrossAttnDownBlock2D, DownBlock2D), (UNetMidBlock2DCrossAttn,), (CrossAttnUpBlock2D, UpBlock2D)
_PARTS = {
    "resnets": ResnetBlock2D,
    "attentions": Transformer2DModel,
    "downsamplers": Downsample2D,
    "upsamplers": Upsample2D,
}
# The blocks of transformers, and the processor of their attention.
_JOINT_BLOCKS: Mapping[type, type] = {
    JointTransformerBlock: JointAttnProcessor2_0,
    FluxTransformerBlock: FluxAttnProcessor,
    FluxSingleTransformerBlock: FluxAttnProcessor,
}
# Attributes of FreeU, which changes skip connections in the forward of up blocks.
_FREEU = ("s1", "s2", "b1", "b2")
# Optional parts of an attention layer besides its four projections.
_ADDITIONS = ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "added_kv_proj_dim")


def unsupported(network: ModelMixin) -> str:
    """Return why masked rows cannot be computed with a network, as a clause; empty if they can."""
    return next(_reasons(network), "")


def _reasons(network: ModelMixin) -> Iterator[str]:
    if type(network) in (SD3Transformer2DModel, FluxTransformer2DModel):
        yield from _of_joint_blocks(network)
    elif type(network) is UNet2DConditionModel:
        yield from _of_unet(network)
        if network.config.in_channels != network.config.out_channels:
            yield "the network reads the mask itself"
    else:
        yield f"blocks of a {type(network).__name__} cannot be masked yet"


def _of_joint_blocks(transformer: ModelMixin) -> Iterator[str]:
    if patch_size(transformer).bit_count() != 1:
        yield "the side of a patch is no power of 2"
    for path in joint_paths(transformer):
        block = transformer.get_submodule(path)
        processor = _JOINT_BLOCKS.get(type(block))
        if processor is None:
            yield f"the network has a {type(block).__name__}"
            return
        if getattr(block, "_chunk_size", None) is not None:
            yield "a feed-forward layer is not in one piece"
        for attention in filter(None, (block.attn, getattr(block, "attn2", None))):
            if type(attention.processor) is not processor:
                yield f"an attention layer has the processor {type(attention.processor).__name__}"
            if attention.fused_projections:
                yield "an attention layer fuses its projections"


def _of_unet(unet: UNet2DConditionModel) -> Iterator[str]:
    middle = () if unet.mid_block is None else (unet.mid_block,)  # pruned models may have none
    for known, blocks in ((_DOWN, unet.down_blocks), (_MIDDLE, middle), (_UP, unet.up_blocks)):
        for block in blocks:
            if type(block) not in known:
                yield f"the network has a {type(block).__name__}"
                return
            if any(getattr(block, each, None) for each in _FREEU):
                yield "FreeU is on"
            for name, kind in _PARTS.items():
                for module in getattr(block, name, None) or ():
                    if type(module) is not kind:
                        yield f"{name} has a {type(module).__name__}"
                    elif isinstance(module, Transformer2DModel):
                        yield from _of_transformer(module)
            for downsampler in getattr(block, "downsamplers", None) or ():
                if not downsampler.use_conv or downsampler.padding != 1:
                    yield "a downsampler is not a convolution with padding 1"


def _of_transformer(transformer: Transformer2DModel) -> Iterator[str]:
    if not transformer.is_input_continuous:
        yield "a transformer does not read feature maps"
    if not transformer.transformer_blocks:
        yield "a transformer has no block"
    for block in transformer.transformer_blocks:
        if type(block) is not BasicTransformerBlock:
            yield f"a transformer has a {type(block).__name__}"
            return
        if block.norm_type != "layer_norm" or block.pos_embed is not None or hasattr(block, "fuser"):
            yield f"a transformer block has {block.norm_type} and more than attention and feed-forward"
        if block.only_cross_attention or block.double_self_attention or block.attn2 is None:
            yield "a transformer block does not have one self-attention and one cross-attention"
            return
        if type(block.ff.net[0]) is not GEGLU or block._chunk_size is not None:
            yield "a feed-forward layer is not a GEGLU in one piece"
        for attention in (block.attn1, block.attn2):
            yield from _of_attention(attention)


def _of_attention(attention: Attention) -> Iterator[str]:
    if type(attention.processor) is not AttnProcessor2_0:
        yield f"an attention layer has the processor {type(attention.processor).__name__}"
    if any(getattr(attention, each, None) is not None for each in _ADDITIONS):
        yield "an attention layer has norms or projections of its own"
    if attention.residual_connection or attention.rescale_output_factor != 1.0:
        yield "an attention layer adds its input or scales its output"
    if attention.inner_kv_dim != attention.inner_dim or attention.fused_projections or not attention.scale_qk:
        yield "an attention layer shares or fuses its projections"


# Side of the probe's mask, as a share of the picture's: a fifth of the area.
_MASKED = 0.45
# Both halves of a guided request.
_ROWS = 2


def masked_probe(model: Model) -> Probe:
    """Return a probe that packs and merges tokens, and cuts and pastes tiles, for a mask in the middle of two rows."""
    network, side = model.backbone.network, model.latent_scale * model.patch_size
    height, width = model.defaults.height // side, model.defaults.width // side
    channels = int(network.config.block_out_channels[0] if model.unet else network.inner_dim)
    generator = torch.Generator("cpu").manual_seed(0)
    maps = torch.randn(_ROWS, channels, height, width, generator=generator).to(model.device, model.dtype)
    recorded = torch.randn(height * width, channels, generator=generator).to(model.device, torch.float16)
    box = _middle(height, width)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[box.rows, box.columns] = True
    tokens = MaskTokens(mask).at(height, width)

    def run() -> Sequence[Tensor]:
        moves = model.operations.moves
        packing = pack_rows([tokens] * _ROWS, height * width, model.device, moves=moves)
        items = packing.pack(maps.flatten(2).transpose(1, 2))
        merged = packing.merge(items, [recorded] * _ROWS)
        rows = tuple(range(_ROWS))
        tiles = Tiles(rows=rows, rectangles=(box,) * _ROWS, size=(height, width), offsets=(*rows, _ROWS), moves=moves)
        cut = tiles.take([maps], margin=1)
        pasted = maps.clone()
        tiles.paste(pasted, tiles.core(cut, 1) * 2)
        return items, merged, cut, pasted

    return run


def _middle(height: int, width: int) -> Rectangle:
    size = max(1, round(height * _MASKED)), max(1, round(width * _MASKED))
    return Rectangle(top=(height - size[0]) // 2, left=(width - size[1]) // 2, height=size[0], width=size[1])


# Lower bound on the mean cosine of block outputs under two prompts; the embedded model has .75 to .9. SSIM with the
# fully computed edit there (12 edits each): .994 if both halves reuse another prompt's recording, .998 if only the half
# without the prompt does, .9998 if prompt and subject are those of the recording.
LEAST_COSINE = 0.95

# A prompt unlike any that users give to edits.
PROBE_PROMPT = "an empty blackboard in a classroom at night"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCosines:
    """Cosine between block outputs under two prompts, as the mean over tokens, by block."""

    cosines: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean over all blocks; 1 if there are none."""
        return sum(self.cosines.values()) / len(self.cosines) if self.cosines else 1.0

    @property
    def reliable(self) -> bool:
        """Whether an edit may reuse activations that were recorded with another prompt."""
        return self.mean >= LEAST_COSINE


@torch.inference_mode()
def measure_prompts(
    model: Model, spec: ResolvedSpec, conditions: Conditions, request: Request, blocks: Sequence[str]
) -> PromptCosines:
    """Compare the outputs of blocks for an edit's template under the edit's prompt and under `PROBE_PROMPT`.

    Both rows see the image with the noise of the middle step. `blocks` are module paths.
    """
    middle = (spec.begin_step + spec.num_inference_steps) // 2
    sampler = model.samplers.open(
        spec.sampling,
        steps=spec.num_inference_steps,
        begin=middle,
        tokens=model.tokens(width=spec.width, height=spec.height),
    )
    step = sampler.first_evaluation
    edit = request.edit
    assert edit is not None, "the order has a mask"
    noisy = sampler.add_noise(edit.image_latent, edit.noise, step)
    sample, timestep = sampler.model_input(noisy, step)[0], sampler.timestep(step)
    probe = encode_prompts(model, _probe(model, spec)).conditional
    # As long as a prompt of several chunks. Attention to states that are repeated equals attention to them once.
    repeats = len(conditions.conditional.prompt) // len(probe.prompt)
    probe = replace(probe, prompt=probe.prompt.repeat(repeats, 1))

    def row(embeds: Embeds) -> Row:
        return Row(
            owner=None,
            step=step,
            half=Half.CONDITIONAL,
            sample=sample,
            timestep=timestep,
            embeds=embeds,
            image=request.image,
        )

    return _compare(model, [row(conditions.conditional), row(probe)], blocks)


def _probe(model: Model, spec: ResolvedSpec) -> ResolvedSpec:
    return ResolvedSpec(
        prompt=PROBE_PROMPT,
        width=spec.width,
        height=spec.height,
        guidance_scale=spec.guidance_scale if model.embeds_guidance else 1.0,
        max_sequence_length=spec.max_sequence_length,
    )


def _compare(model: Model, rows: Sequence[Row], blocks: Sequence[str]) -> PromptCosines:
    outputs: dict[str, Tensor] = {}
    with _watched(model.backbone.network, blocks, outputs):
        activations = model.backbone.begin(stack(rows))
        for block in model.backbone.blocks:
            block.run(activations)
    compared = {name: functional.cosine_similarity(first, second, dim=-1) for name, (first, second) in outputs.items()}
    return PromptCosines(cosines={name: float(cosine.mean()) for name, cosine in compared.items()})


@contextmanager
def _watched(network: nn.Module, names: Sequence[str], outputs: dict[str, Tensor]) -> Iterator[None]:
    """Collect the outputs of these modules, [rows, tokens, channels], during the `with` block."""

    def keep(name: str) -> Callable[[nn.Module, object, tuple[Tensor, ...] | Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...] | Tensor) -> None:
            # Joint blocks return the text's tokens first.
            tensor = output if isinstance(output, Tensor) else output[-1]
            outputs[name] = (tensor if tensor.ndim == 3 else tensor.flatten(2).transpose(1, 2)).float()

        return hook

    # The output projection of a transformer is added to the transformer's input, and the next layer reads the sum. So
    # the hook is on the transformer.
    handles = [
        network.get_submodule(name.removesuffix(".proj_out")).register_forward_hook(keep(name)) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

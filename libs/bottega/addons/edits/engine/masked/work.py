"""The work of each block of a masked network: recorded outputs, their bytes, and floating-point operations.

A block is the unit that is either reused or computed: one transformer block, or the convolutions of one layer over
feature maps. Times on a device are fitted to these values, or measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from diffusers import FluxTransformer2DModel, ModelMixin, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import nn

from bottega.addons.edits.engine.masked.feature_maps import is_plain
from bottega.addons.edits.engine.masked.joint import joint_blocks, joint_paths
from bottega.addons.edits.engine.masked.tokens import patch_size
from bottega.addons.edits.engine.sparse.maps import convolves_plainly, upsamples_plainly

_Size = tuple[int, int]
_FLOAT16_BYTES = 2
# Tokens of a prompt. Stable Diffusion 3 reads T5's tokens after CLIP's; Flux.1 dev reads only T5's, twice as many.
_CLIP_TOKENS, _T5_TOKENS = 77, 256


class BlockKind(Enum):
    """A kind of block: a transformer block over tokens, or convolutions over feature maps."""

    TRANSFORMER = "transformer"
    MAPS = "maps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """The work of one block for one row."""

    name: str
    """Path of the block's module."""
    names: tuple[str, ...]
    """Names of the block's recorded outputs, in order of execution."""
    kind: BlockKind
    size: _Size
    """Height and width of the block's resolution, in tokens or elements."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the recorded outputs, which are float16."""
    flops: float
    """Floating-point operations if all tokens are computed."""
    fixed_flops: float = 0.0
    """The part of `flops` that is computed for every token, whatever the mask."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the recorded outputs."""
        return sum(map(math.prod, self.shapes)) * _FLOAT16_BYTES

    def flops_at(self, share: float) -> float:
        """Return the operations if this share of the block's tokens or elements is computed."""
        return self.fixed_flops + (self.flops - self.fixed_flops) * min(1.0, share)


def blocks_of(
    network: ModelMixin, size: _Size, *, prompt_tokens: int | None = None, sparse: bool = True
) -> tuple[BlockWork, ...]:
    """Return a network's blocks in order of execution, for latents of this size; only transformer blocks if not sparse.

    `prompt_tokens` is by default the number of a prompt's tokens. Raise ValueError if two blocks have the same name.
    """
    if isinstance(network, UNet2DConditionModel):
        made = tuple(_Walk(size=size, prompt_tokens=prompt_tokens or _CLIP_TOKENS).blocks(network))
    else:
        made = tuple(_joint_blocks(network, size, prompt_tokens or _joint_tokens(network)))
    kept = tuple(block for block in made if sparse or block.kind is BlockKind.TRANSFORMER)
    recorded = Counter(name for block in kept for name in block.names)
    twice = [name for name, count in recorded.items() if count > 1]
    if twice:
        raise ValueError(f"two blocks record {twice[0]}")
    return kept


def _joint_tokens(transformer: ModelMixin) -> int:
    if isinstance(transformer, FluxTransformer2DModel):
        return 2 * _T5_TOKENS if transformer.config.guidance_embeds else _T5_TOKENS
    return _CLIP_TOKENS + _T5_TOKENS


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Collects a network's blocks in the order of a forward pass."""

    size: _Size
    """Size of the current feature maps."""
    prompt_tokens: int

    def blocks(self, unet: UNet2DConditionModel) -> Iterator[BlockWork]:
        sizes = [self.size]
        for index, block in enumerate(unet.down_blocks):
            yield from self._layers(block, f"down_blocks.{index}")
            for place, downsampler in enumerate(block.downsamplers or ()):
                self.size = (-(-self.size[0] // 2), -(-self.size[1] // 2))
                sizes.append(self.size)
                if convolves_plainly(downsampler):
                    yield self._convolution(f"down_blocks.{index}.downsamplers.{place}", downsampler.conv)
        yield from self._middle(unet.mid_block)
        for index, block in enumerate(unet.up_blocks):
            sizes = sizes[:-1] if block.upsamplers else sizes
            yield from self._layers(block, f"up_blocks.{index}")
            for place, upsampler in enumerate(block.upsamplers or ()):
                self.size = sizes[-1]
                if upsamples_plainly(upsampler):
                    yield self._convolution(f"up_blocks.{index}.upsamplers.{place}", upsampler.conv)
        if unet.conv_norm_out:
            yield self._last(unet)

    def _layers(self, block: Any, path: str) -> Iterator[BlockWork]:
        attentions: Sequence[Transformer2DModel] = getattr(block, "attentions", None) or ()
        for place, resnet in enumerate(block.resnets):
            yield from self._resnet(f"{path}.resnets.{place}", resnet)
            if place < len(attentions):
                yield from self._transformer(f"{path}.attentions.{place}", attentions[place])

    def _middle(self, block: Any) -> Iterator[BlockWork]:
        for place, resnet in enumerate(block.resnets if block is not None else ()):
            if place:
                path = f"mid_block.attentions.{place - 1}"
                yield from self._transformer(path, block.attentions[place - 1])
            yield from self._resnet(f"mid_block.resnets.{place}", resnet)

    def _resnet(self, path: str, resnet: ResnetBlock2D) -> Iterator[BlockWork]:
        if not is_plain(resnet):
            return
        convolutions = [resnet.conv1, resnet.conv2, *([resnet.conv_shortcut] if resnet.conv_shortcut else [])]
        recorded = {
            f"{path}.norm1:moments": 2 * resnet.norm1.num_groups,
            f"{path}.norm2:moments": 2 * resnet.norm2.num_groups,
            f"{path}:map": resnet.conv2.out_channels,
        }
        yield self._maps(path, recorded, sum(_flops(each) for each in convolutions))

    def _convolution(self, path: str, convolution: nn.Conv2d) -> BlockWork:
        return self._maps(path, {f"{path}:map": convolution.out_channels}, _flops(convolution))

    def _last(self, unet: UNet2DConditionModel) -> BlockWork:
        recorded = {
            "conv_norm_out:moments": 2 * unet.conv_norm_out.num_groups,
            "conv_out:map": unet.conv_out.out_channels,
        }
        return self._maps("conv_out", recorded, _flops(unet.conv_out))

    def _transformer(self, path: str, transformer: Transformer2DModel) -> Iterator[BlockWork]:
        projection: Any = transformer.proj_in
        recorded = {
            f"{path}.norm:moments": 2 * transformer.norm.num_groups,
            f"{path}.proj_in:map": projection.weight.shape[0],
        }
        yield self._maps(f"{path}.proj_in", recorded, _flops(projection))
        blocks: Sequence[BasicTransformerBlock] = list(transformer.transformer_blocks)
        for place, block in enumerate(blocks):
            last = place == len(blocks) - 1
            module = f"{path}.transformer_blocks.{place}"
            yield self._block(
                module,
                block,
                recorded=f"{path}.proj_out" if last else module,
                behind=transformer.proj_out if last else None,
            )

    def _block(self, path: str, block: BasicTransformerBlock, *, recorded: str, behind: Any) -> BlockWork:
        """Return the work of a transformer block. The last block of a transformer is recorded after its projection."""
        tokens, channels = self._elements, int(block.attn1.to_q.in_features)
        inner = int(block.attn1.inner_dim)
        # Keys and values of self-attention are computed for every token; those of the prompt are kept from step to
        # step.
        fixed = 2 * tokens * channels * 2 * inner
        attention = 4 * tokens * tokens * inner + 2 * tokens * channels * 2 * inner
        cross = 4 * tokens * self.prompt_tokens * inner + 2 * tokens * channels * 2 * inner
        feed_forward = tokens * _flops_of_all(block.ff)
        out = 2 * tokens * behind.weight.numel() if behind is not None else 0
        width = int(behind.weight.shape[0]) if behind is not None else channels
        return BlockWork(
            name=path,
            names=(recorded,),
            kind=BlockKind.TRANSFORMER,
            size=self.size,
            shapes=((tokens, width),),
            flops=float(fixed + attention + cross + feed_forward + out),
            fixed_flops=float(fixed),
        )

    def _maps(self, path: str, recorded: dict[str, int], flops: float) -> BlockWork:
        """Return the work of convolutions, from the channels of recorded outputs and the operations per element."""
        return BlockWork(
            name=path,
            names=tuple(recorded),
            kind=BlockKind.MAPS,
            size=self.size,
            shapes=tuple((channels, *self.size) for channels in recorded.values()),
            flops=self._elements * flops,
        )

    @property
    def _elements(self) -> int:
        return self.size[0] * self.size[1]


def _joint_blocks(transformer: ModelMixin, size: _Size, text: int) -> Iterator[BlockWork]:
    """Yield the blocks of a transformer that attends to image and text jointly. `text` is its number of tokens."""
    patch, names = patch_size(transformer), joint_blocks(transformer)
    in_tokens = size[0] // patch, size[1] // patch
    tokens = in_tokens[0] * in_tokens[1]
    for path, name in zip(joint_paths(transformer), names, strict=True):
        block: Any = transformer.get_submodule(path)
        behind: Any = transformer.proj_out if name == names[-1] else None
        count = _single_flops if isinstance(block, FluxSingleTransformerBlock) else _joint_flops
        fixed, masked = count(block, tokens, text, is_last=behind is not None)
        masked += tokens * _flops(behind) if behind is not None else 0.0
        width = block.attn.to_q.in_features if behind is None else behind.out_features
        yield BlockWork(
            name=path,
            names=(name,),
            kind=BlockKind.TRANSFORMER,
            size=in_tokens,
            shapes=((tokens, int(width)),),
            flops=fixed + masked,
            fixed_flops=fixed,
        )


def _joint_flops(block: Any, tokens: int, text: int, *, is_last: bool) -> tuple[float, float]:
    """Return a joint block's operations whatever the mask, and those of all image tokens that a mask may leave out."""
    joint, own = block.attn, list(filter(None, [getattr(block, "attn2", None)]))
    projected = sum(_flops(each.to_k) + _flops(each.to_v) for each in (joint, *own))
    computed = sum(_flops(each.to_q) + _flops(each.to_out[0]) for each in (joint, *own)) + _flops_of_all(block.ff)
    # Of a query: it is compared with every key, and adds every value.
    jointly, alone = 4 * int(joint.inner_dim) * (tokens + text), 4 * int(joint.inner_dim) * tokens
    of_text = _flops(joint.add_k_proj) + _flops(joint.add_v_proj)
    if not is_last:  # Nothing reads the text's tokens after the last block.
        of_text += jointly + _flops(joint.add_q_proj) + _flops(joint.to_add_out) + _flops_of_all(block.ff_context)
    return tokens * projected + text * of_text, tokens * (computed + jointly + alone * len(own))


def _single_flops(block: Any, tokens: int, text: int, *, is_last: bool) -> tuple[float, float]:
    """Return the operations of a block with shared layers for image and text; see `_joint_flops`."""
    attention = block.attn
    projected = _flops(attention.to_k) + _flops(attention.to_v)
    computed = _flops(attention.to_q) + _flops(block.proj_mlp) + _flops(block.proj_out)
    computed += 4 * int(attention.inner_dim) * (tokens + text)
    return (tokens + text) * projected + (0 if is_last else text * computed), tokens * computed


def _flops_of_all(module: nn.Module) -> float:
    """Return the operations of a module's projections, per token."""
    return sum(_flops(each) for each in module.modules() if isinstance(each, nn.Linear))


def _flops(layer: Any) -> float:
    """Return the operations of a convolution or projection, per output element."""
    return 2.0 * float(layer.weight.numel())

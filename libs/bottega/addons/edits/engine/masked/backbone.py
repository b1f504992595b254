"""The denoising network for masked rows: transformers compute only masked tokens, and read others from recordings.

It is a second backbone over the modules of the plain one, with the same blocks and residuals. Rows of edits with
different masks, rows that record, and plain rows share a forward pass. A plain row's result equals that of the plain
backbone. Source: InstGenIE (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diffusers import ModelMixin, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from bottega.addons.edits.engine.activations import edit_activations
from bottega.addons.edits.engine.masked.checks import unsupported
from bottega.addons.edits.engine.masked.feature_maps import FeatureMaps, FullMaps
from bottega.addons.edits.engine.masked.joint import MaskedJointBackbone, joint_blocks
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, TokenCache
from bottega.addons.edits.engine.masked.transformer import MaskedTransformer, PromptCache
from bottega.device.memory_plan import MemoryPlan
from bottega.model.backbone import Activations, Backbone, Inputs, RowSpans
from bottega.model.backbones import make_backbone
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.operations import Operations
from bottega.model.rows import Row


class UnsupportedNetwork(ValueError):
    """The error that a network has a part that the masked backbone does not support. The message names the part."""


class MaskedBackbone(UNetBackbone):
    """A UNet whose rows may reuse recorded activations.

    Args:
        maps: Computes feature maps; the default computes all of their elements.
        beat: Called after each block, see `Heartbeat`.
        memory: The device's memory, in which keys and values of prompts are cached.
    """

    def __init__(
        self,
        unet: UNet2DConditionModel,
        *,
        maps: FeatureMaps | None = None,
        beat: Callable[[], None] | None = None,
        operations: Operations | None = None,
        memory: MemoryPlan | None = None,
    ) -> None:
        self.spans: RowSpans = RowSpans()
        self._tokens = TokenCache()
        self._prompts = PromptCache(memory=memory)
        self._maps: FeatureMaps = maps or FullMaps()
        self._beat = beat
        self._operations = operations or Operations()
        self._transformers = {path: MaskedTransformer(module, path) for path, module in _transformers(unet).items()}
        super().__init__(unet)

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | None:
        """Return this backbone for batches with a row that reads or writes a recording; None for others."""
        return self if any(row.activations is not None for row in rows) else None

    def begin(self, inputs: Inputs) -> MaskedActivations:
        sample, embedding = self.embed(inputs)
        forward = MaskedActivations(
            hidden=sample,
            embedding=embedding,
            context=inputs.prompt_embeds,
            edits=[edit_activations(activations) for activations in inputs.activations] or [None] * len(sample),
            cache=self._tokens,
            spans=self.spans,
            prompts=self._prompts.of(inputs.origins),
            moves=self._operations.moves,
        )
        forward.hidden = forward.points[0] = self._maps.conv_in(self.network, sample, forward)
        return forward

    def finish(self, activations: Activations) -> Tensor:
        return self._maps.conv_out(self.network, activations.hidden, _masked(activations))

    def _down(self, index: int, first_point: int) -> Callable[[Activations], None]:
        block, path = self.network.down_blocks[index], f"down_blocks.{index}"

        def run(activations: Activations) -> None:
            forward = _masked(activations)
            for place, resnet in enumerate(block.resnets):
                self._resnet(resnet, f"{path}.resnets.{place}", (forward.hidden,), forward)
                self._attend(f"{path}.attentions.{place}", forward)
                forward.points[first_point + place] = forward.hidden
            for place, downsampler in enumerate(block.downsamplers or ()):
                forward.hidden = self._maps.downsample(
                    downsampler, f"{path}.downsamplers.{place}", forward.hidden, forward
                )
                forward.points[first_point + len(block.resnets) + place] = forward.hidden

        return run

    def _middle(self, activations: Activations) -> None:
        forward, block = _masked(activations), self.network.mid_block
        for place, resnet in enumerate(block.resnets if block is not None else ()):
            if place:
                self._attend(f"mid_block.attentions.{place - 1}", forward)
            self._resnet(resnet, f"mid_block.resnets.{place}", (forward.hidden,), forward)
        if block is None:
            forward.hidden = forward.hidden.clone()  # as in UNetBackbone
        forward.points[self.middle_point] = forward.hidden

    def _up(self, index: int, taken: tuple[int, ...]) -> Callable[[Activations], None]:
        block, path = self.network.up_blocks[index], f"up_blocks.{index}"
        last = index == len(self.network.up_blocks) - 1
        middle = self.middle_point if index == 0 else None

        def run(activations: Activations) -> None:
            forward = _masked(activations)
            if middle is not None:
                forward.hidden = forward.points.pop(middle)
            size = None if last else forward.points[taken[0] - 1].shape[2:]
            for place, (resnet, point) in enumerate(zip(block.resnets, reversed(taken), strict=True)):
                parts = (forward.hidden, forward.points.pop(point))
                self._resnet(resnet, f"{path}.resnets.{place}", parts, forward)
                self._attend(f"{path}.attentions.{place}", forward)
            for place, upsampler in enumerate(block.upsamplers or ()):
                name = f"{path}.upsamplers.{place}"
                forward.hidden = self._maps.upsample(upsampler, name, forward.hidden, forward, size=size)

        return run

    def _resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> None:
        forward.hidden = self._maps.resnet(resnet, path, parts, forward)

    def _attend(self, path: str, forward: MaskedActivations) -> None:
        transformer = self._transformers.get(path)
        if transformer is None:
            return
        hidden = forward.hidden
        _, _, height, width = hidden.shape
        tokens = self._maps.tokens_in(transformer.module, path, hidden, forward)
        packed = transformer.run(tokens, (height, width), forward)
        forward.hidden = self._maps.tokens_out(transformer.module, path, packed, hidden, forward)
        if self._beat is not None:
            self._beat()


MadeMasked = MaskedBackbone | MaskedJointBackbone
"""The masked backbones of networks that are served."""


def make_masked_backbone(
    network: ModelMixin,
    *,
    maps: FeatureMaps | None = None,
    beat: Callable[[], None] | None = None,
    operations: Operations | None = None,
    memory: MemoryPlan | None = None,
) -> MadeMasked:
    """Return the masked blocks of a denoising network; see `MaskedBackbone`. A transformer has no feature maps.

    Raise UnsupportedNetwork if `unsupported` gives a reason.
    """
    reason = unsupported(network)
    if reason:
        raise UnsupportedNetwork(reason)
    if isinstance(network, UNet2DConditionModel):
        return MaskedBackbone(network, maps=maps, beat=beat, operations=operations, memory=memory)
    plain = make_backbone(network)
    assert isinstance(plain, Sd3Backbone | FluxBackbone), "`unsupported` refuses other networks"
    return MaskedJointBackbone(plain, beat=beat, operations=operations)


def transformer_blocks(network: ModelMixin) -> tuple[str, ...]:
    """Return the names of recorded outputs, one for each transformer block."""
    if not isinstance(network, UNet2DConditionModel):
        return joint_blocks(network)
    transformers = _transformers(network)
    return tuple(name for path, module in transformers.items() for name in MaskedTransformer(module, path).names)


def _transformers(unet: UNet2DConditionModel) -> dict[str, Transformer2DModel]:
    parts = (("down_blocks", unet.down_blocks), ("mid_block", [unet.mid_block]), ("up_blocks", unet.up_blocks))
    return {
        f"{name if name == 'mid_block' else f'{name}.{index}'}.attentions.{place}": transformer
        for name, blocks in parts
        for index, block in enumerate(blocks)
        for place, transformer in enumerate(getattr(block, "attentions", ()))
    }


def _masked(activations: Activations) -> MaskedActivations:
    assert isinstance(activations, MaskedActivations), "they are what `begin` has made"
    return activations

"""Small networks of Stable Diffusion's parts with rows and recordings, for tests of the masked backbones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, ModelMixin, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations, KeptProjections
from bottega.addons.edits.engine.masked.backbone import MadeMasked
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import Network, stack
from bottega.model.backbone import GUIDANCE, POOLED
from bottega.model.backbones import make_backbone
from bottega.model.rows import Embeds, Factors, Half, LoraSet, Row
from bottega.model_files.family_names import UNET

_TEXT, _POOLED = 24, 8
PROMPT_TOKENS = 7
LATENT = (16, 16)


def small_unet(seed: int = 0, **options: Any) -> UNet2DConditionModel:
    """Three levels as SDXL's; the finest has no attention, the others have transformers of two and three blocks."""
    said = {
        "sample_size": LATENT[0],
        "block_out_channels": (16, 32, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (1, 2, 2),
        "norm_num_groups": 8,
        "cross_attention_dim": _TEXT,
        "use_linear_projection": True,
    } | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**said)
        _draw_weights(unet)
    return unet.eval()


def small_joint(seed: int = 0, **options: Any) -> SD3Transformer2DModel:
    """Three joint blocks as those of Stable Diffusion 3.5: with norms of queries and keys, two with two attentions."""
    said = {
        "sample_size": LATENT[0],
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": _TEXT,
        "caption_projection_dim": 32,
        "pooled_projection_dim": _POOLED,
        "pos_embed_max_size": 24,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0, 2),
    } | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(**said)
        _draw_weights(transformer)
    return transformer.eval()


def small_flux(seed: int = 0, **options: Any) -> FluxTransformer2DModel:
    """Return a small random Flux.1 dev transformer with one joint block and two single blocks.

    The joint block has separate layers for text tokens.
    """
    said = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": _TEXT,
        "pooled_projection_dim": _POOLED,
        "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4),
    } | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(**said)
        _draw_weights(transformer)
    return transformer.eval()


def _draw_weights(network: ModelMixin) -> None:
    for parameter in network.parameters():
        if parameter.dim() > 1:  # its own beginnings are small: what attention makes of them would not be seen
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def denoiser_of(network: ModelMixin, masked: MadeMasked | None = None, **options: Any) -> Denoiser:
    """Return a denoiser with the plain network, and the masked one for rows of edits. `options` are Network's."""
    strategies = () if masked is None else (masked,)
    return Denoiser(Network(backbone=make_backbone(network), strategies=strategies, **options))


@dataclass(eq=False)
class StepInMemory:
    """RecordedActivations. asked: names in the order in which they were asked for. projections: kept, if any.
    dtype: of what is recorded."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    reused: set[str] = field(default_factory=set)
    waited_s: float = 0.0
    projections: KeptProjections | None = None
    dtype: torch.dtype = torch.float16

    def get(self, name: str) -> Tensor | None:
        self.asked.append(name)
        if name in self.outputs:
            self.reused.add(name)
        return self.outputs.get(name)

    def stored(self, name: str) -> Tensor | None:
        return self.outputs.get(name)

    def put(self, name: str, output: Tensor) -> None:
        assert output.isfinite().all()
        self.outputs[name] = output.to(self.dtype, copy=True)


def plain_row(seed: int, *, size: tuple[int, int] = LATENT, **options: Any) -> Row:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randn(PROMPT_TOKENS, _TEXT, generator=generator)
    sample = torch.randn(4, *size, generator=generator)
    pooled = torch.randn(_POOLED, generator=generator)
    added = {"text_embeds": torch.zeros(1), "time_ids": torch.zeros(6), POOLED: pooled, GUIDANCE: torch.tensor([3.5])}
    embeds = Embeds(prompt=prompt, added=added)
    made = Row(owner=seed, step=0, half=Half.CONDITIONAL, sample=sample, timestep=torch.tensor(501.0), embeds=embeds)
    return replace(made, **options)


def recording(row: Row, recorded: StepInMemory) -> Row:
    """The row, computed in full and recorded."""
    return replace(row, activations=EditActivations(sink=recorded))


def masked(row: Row, recorded: StepInMemory, computed: Tensor, sink: StepInMemory | None = None) -> Row:
    """The row, computed where the map says, and taken from what was recorded elsewhere."""
    return replace(row, activations=EditActivations(computed=computed, recorded=recorded, sink=sink))


def box(top: int, left: int, height: int, width: int, *, size: tuple[int, int] = LATENT) -> Tensor:
    """A map that computes this box."""
    computed = torch.zeros(size, dtype=torch.bool)
    computed[top : top + height, left : left + width] = True
    return computed


def random_loras(network: ModelMixin, seed: int, paths: Sequence[str], rank: int = 3) -> LoraSet:
    """A set that changes the layers whose path ends so."""
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Factors] = {}
    for path, module in network.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and path.endswith(tuple(paths)):
            out, *rest = module.weight.shape
            up, down = torch.randn(out, rank, generator=generator), torch.randn(rank, *rest, generator=generator)
            factors[path] = Factors(down=down * 0.1, up=up * 0.3)
    assert factors
    return LoraSet(key=((f"{seed:064x}", 1.0),), components={UNET: factors})


def patch(unet: UNet2DConditionModel, loras: LoraSet) -> None:
    """Puts a set into the weights, from the definition."""
    factors: Mapping[str, Factors] = loras.of(UNET)
    for path, each in factors.items():
        weight = unet.get_submodule(path).weight
        product = each.up.flatten(1).double() @ each.down.flatten(1).double()
        weight.data += product.view_as(weight).to(weight.dtype)


def point_shapes(network: ModelMixin, size: tuple[int, int]) -> list[torch.Size]:
    """Of the residuals of one row, [channels, height, width] or [tokens, channels], by residual point."""
    backbone, shapes = make_backbone(network), dict[int, torch.Size]()
    activations = backbone.begin(stack([plain_row(0, size=size)]))
    for block in backbone.blocks:
        block.run(activations)
        shapes.update({point: tensor.shape[1:] for point, tensor in activations.points.items()})
    return [shapes[point] for point in sorted(shapes)]

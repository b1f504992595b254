"""Measures the seconds of each block of a network, for all and for masked tokens, and ranks blocks for recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.masked.backbone import MadeMasked, make_masked_backbone
from bottega.addons.edits.engine.masked.feature_maps import FeatureMaps, FullMaps, PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.tokens import MaskedActivations
from bottega.addons.edits.engine.masked.work import BlockWork
from bottega.addons.edits.engine.recordings.step_access import StepRecorder
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.addons.edits.planning import BlockValue, choose
from bottega.engine.encode import sample_conditions
from bottega.engine.forward import stack
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.v1.activations_pb2 import BlockCost, BlockProfile

SHARES = (0.05, 0.2, 0.4)
"""Shares of the tokens for which blocks are timed. The computed tokens form a square in the middle of the picture."""

# Repetitions of each forward, after a warm-up; each block's median counts. A slow device stops after `_ENOUGH_S`.
_FORWARDS = 7
_ENOUGH_S = 20.0

# Share of the tokens that a typical edit computes, by which blocks are valued: the production traces of InstGenIE
# (2025) have masks of .11, .19 and .35 on average.
_TYPICAL_SHARE = 0.2


@torch.inference_mode()
def measure_blocks(
    model: Model, blocks: Sequence[BlockWork], size: tuple[int, int], *, sparse: bool, beat: Callable[[], None]
) -> BlockProfile:
    """Measure the blocks of a network with one row, for latents of `size`, [height, width]."""
    measurement = _Measurement(model, blocks, size, sparse=sparse, beat=beat)
    in_full = measurement.forward(SHARES[0], recorded=False)
    of_shares = [measurement.forward(share, recorded=True) for share in SHARES]
    (full, forward_s), *masked = measurement.by_turns([in_full, *of_shares])
    height, width = size
    costs = [
        BlockCost(
            name=block.name,
            size_bytes=block.size_bytes,
            full_s=full[block.name],
            masked_s=[seconds[block.name] for seconds, _ in masked],
        )
        for block in blocks
    ]
    return BlockProfile(
        model_hash=model.digest,
        dtype=model.dtype_name,
        width=width * model.latent_scale,
        height=height * model.latent_scale,
        shares=SHARES,
        blocks=costs,
        forward_s=forward_s,
        about=f"one row on {_device_name(model.device)}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    )


def kept_names(
    blocks: Sequence[BlockWork], *, budget_bytes: int, forwards: int, profile: BlockProfile | None = None
) -> frozenset[str] | None:
    """Return the names of the outputs to record in every forward pass; None to record all.

    Blocks are ranked by the seconds that they save per byte: as measured, or else in proportion to their floating-point
    operations. `budget_bytes` is for all forward passes together; 0 is no limit.
    """
    forward_budget_bytes = budget_bytes // max(1, forwards)
    if not budget_bytes or sum(block.size_bytes for block in blocks) <= forward_budget_bytes:
        return None
    measured = _saved_s(profile) if profile is not None else {}
    if not measured.keys() >= {block.name for block in blocks}:
        measured = {block.name: block.flops - block.flops_at(_TYPICAL_SHARE) for block in blocks}
    values = [
        BlockValue(name=block.name, saved_s=measured[block.name], size_bytes=block.size_bytes) for block in blocks
    ]
    chosen = choose(values, forward_budget_bytes)
    return frozenset(name for block in blocks if block.name in chosen for name in block.names)


def _saved_s(profile: BlockProfile) -> dict[str, float]:
    """Return the seconds that each block saves, by name, at the measured share nearest to the typical one."""
    if not len(profile.shares):
        return {}
    place = min(range(len(profile.shares)), key=lambda place: abs(profile.shares[place] - _TYPICAL_SHARE))
    return {block.name: block.full_s - block.masked_s[place] for block in profile.blocks if place < len(block.masked_s)}


class _Clock:
    """RecordedActivations that measure the time of each block, from when the forward pass first reads its outputs."""

    def __init__(
        self,
        outputs: Mapping[str, Tensor],
        blocks: Sequence[BlockWork],
        *,
        synchronize: Callable[[], None],
        beat: Callable[[], None],
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds since `start`, by module."""
        self.waited_s = 0.0
        self.reused: Collection[str] = ()
        self.projections = None
        self._outputs = outputs
        self._owners = {name: block.name for block in blocks for name in block.names}
        self._synchronize = synchronize
        self._beat = beat
        self._running = ""
        self._since_s = 0.0

    def start(self) -> None:
        """Begin a forward pass."""
        self.seconds, self._running, self._since_s = {}, "", perf_counter()

    def mark(self, module: str) -> None:
        """Stop timing the current module and start timing this one."""
        self._beat()
        self._synchronize()
        now_s = perf_counter()
        self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now_s - self._since_s
        self._running, self._since_s = module, now_s

    def get(self, name: str) -> Tensor | None:
        module = self._owners.get(name, self._running)
        if module != self._running:
            self.mark(module)
        return self._outputs.get(name)

    def stored(self, name: str) -> Tensor | None:
        return self._outputs.get(name)

    def put(self, name: str, output: Tensor) -> None:
        """Ignore the output: a timed forward pass records nothing."""


class _TimedMaps:
    """FeatureMaps that call `_Clock.mark` before each operation."""

    def __init__(self, maps: FeatureMaps, clock: _Clock) -> None:
        self._maps = maps
        self._clock = clock

    def conv_in(self, unet: UNet2DConditionModel, sample: Tensor, forward: MaskedActivations) -> Tensor:
        return self._maps.conv_in(unet, sample, forward)

    def resnet(self, resnet: ResnetBlock2D, path: str, parts: Sequence[Tensor], forward: MaskedActivations) -> Tensor:
        self._clock.mark(path)
        return self._maps.resnet(resnet, path, parts, forward)

    def downsample(self, downsampler: Downsample2D, path: str, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        self._clock.mark(path)
        return self._maps.downsample(downsampler, path, hidden, forward)

    def upsample(
        self, upsampler: Upsample2D, path: str, hidden: Tensor, forward: MaskedActivations, *, size: torch.Size | None
    ) -> Tensor:
        self._clock.mark(path)
        return self._maps.upsample(upsampler, path, hidden, forward, size=size)

    def tokens_in(
        self, transformer: Transformer2DModel, path: str, hidden: Tensor, forward: MaskedActivations
    ) -> TokensIn:
        self._clock.mark(f"{path}.proj_in")
        return self._maps.tokens_in(transformer, path, hidden, forward)

    def tokens_out(
        self,
        transformer: Transformer2DModel,
        path: str,
        packed: PackedTokens,
        hidden: Tensor,
        forward: MaskedActivations,
    ) -> Tensor:
        return self._maps.tokens_out(transformer, path, packed, hidden, forward)

    def conv_out(self, unet: UNet2DConditionModel, hidden: Tensor, forward: MaskedActivations) -> Tensor:
        self._clock.mark("conv_out")
        return self._maps.conv_out(unet, hidden, forward)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Forward:
    """A forward pass to measure: its row, and the clock of its blocks."""

    backbone: MadeMasked
    edit: EditActivations
    clock: _Clock


class _Measurement:
    """The measurement of one network's blocks."""

    def __init__(
        self,
        model: Model,
        blocks: Sequence[BlockWork],
        size: tuple[int, int],
        *,
        sparse: bool,
        beat: Callable[[], None],
    ) -> None:
        self._blocks = blocks
        self._size = size
        self._synchronize = model.runtime.synchronize
        self._beat = beat
        self._network = model.backbone.network
        self._maps: FeatureMaps = SparseMaps() if sparse else FullMaps()
        self._row = _row(model, size)
        recorder = StepRecorder()
        backbone = make_masked_backbone(self._network, maps=self._maps, beat=beat)
        self._run(backbone, EditActivations(sink=recorder))
        self._outputs = recorder.outputs

    def forward(self, share: float, *, recorded: bool) -> _Forward:
        """Return a forward pass that computes a share of the tokens, or all of them, by the same code."""
        clock = _Clock(self._outputs if recorded else {}, self._blocks, synchronize=self._synchronize, beat=self._beat)
        backbone = make_masked_backbone(self._network, maps=_TimedMaps(self._maps, clock))
        edit = EditActivations(computed=_square(self._size, share), share=share, recorded=clock)
        return _Forward(backbone=backbone, edit=edit, clock=clock)

    def by_turns(self, forwards: Sequence[_Forward]) -> list[tuple[dict[str, float], float]]:
        """Return each forward pass's median seconds by block, and of the whole.

        The forward passes alternate, so that a temporarily slow device slows all of them alike.
        """
        for forward in forwards:
            self._timed(forward)
        measured: list[list[dict[str, float]]] = [[] for _ in forwards]
        began_s = perf_counter()
        for _ in range(_FORWARDS):
            for forward, seconds in zip(forwards, measured, strict=True):
                seconds.append(self._timed(forward))
            if perf_counter() - began_s > _ENOUGH_S:
                break
        return [(self._of_blocks(seconds), median(sum(each.values()) for each in seconds)) for seconds in measured]

    def _of_blocks(self, measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {block.name: median(each.get(block.name, 0.0) for each in measured) for block in self._blocks}

    def _timed(self, forward: _Forward) -> dict[str, float]:
        forward.clock.start()
        self._run(forward.backbone, forward.edit)
        forward.clock.mark("")
        return forward.clock.seconds

    def _run(self, backbone: MadeMasked, edit: EditActivations) -> None:
        activations = backbone.begin(stack([replace(self._row, activations=edit)]))
        for block in backbone.blocks:
            block.run(activations)
        backbone.finish(activations)


def _row(model: Model, size: tuple[int, int]) -> Row:
    height, width = (side * model.latent_scale for side in size)
    spec = ResolvedSpec(
        prompt="",
        num_inference_steps=2,
        guidance_scale=1.0,
        width=width,
        height=height,
        sampler=model.defaults.sampler,
        use_karras_sigmas=model.defaults.use_karras_sigmas,
    )
    return Request(model, spec, sample_conditions(model, spec)).rows()[0]


def _square(size: tuple[int, int], share: float) -> Tensor:
    """Return a centred square with about this share of the elements, bool [height, width]."""
    computed = torch.zeros(size, dtype=torch.bool)
    (top, rows), (left, columns) = (_middle(length, share) for length in size)
    computed[top : top + rows, left : left + columns] = True
    return computed


def _middle(length: int, share: float) -> tuple[int, int]:
    part = max(1, round(length * math.sqrt(share)))
    return (length - part) // 2, part


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    name: str = torch.cuda.get_device_name(device)
    return name

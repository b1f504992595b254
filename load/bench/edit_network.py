"""A side of the bench of edits: one forward of a network with masked rows, by what is in memory beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from load.bench.edit_model import EDIT_SHAPE, MARGIN, SIZE, TOKEN, square_mask
from load.bench.framework import GUIDANCE_SCALE, PROMPT
from load.bench.side_process import Answer

if TYPE_CHECKING:
    from torch import Tensor

    from bottega.addons.edits.engine.recordings.step import StepProjections

PLAIN = "plain"
"""A forward of plain rows."""
CACHINGS = {"outputs": "outputs of blocks", "keys_values": "keys and values"}
"""What a forward of masked rows has in memory, and its title."""
_ROOM_BYTES = 4 << 30
_HALF_BYTES, _FLOAT_BYTES = 2, 4


def network(*, model: str, token: int = TOKEN) -> Answer:
    """Make the network alone.

    It answers the seconds of one forward of a guided request's rows, or without a question the share of a plain
    forward that the transformers of a UNet take.
    """
    return Network(Path(model), token).answer


class Network:
    """The network, and what was recorded of it so far."""

    def __init__(self, model: Path, token: int) -> None:
        from bottega.addons.edits.engine.masked.backbone import make_masked_backbone
        from bottega.addons.edits.engine.sparse import SparseMaps
        from bottega.engine.denoiser import Denoiser
        from bottega.engine.encode import sample_conditions
        from bottega.engine.forward import Network as Networks
        from bottega.engine.request import Request
        from bottega.engine.spec import ResolvedSpec
        from load.bench.engine_runs import load_bench_model

        loaded = load_bench_model(model)
        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=2,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            sampler=loaded.defaults.sampler,
        )
        self._rows = Request(loaded, spec, sample_conditions(loaded, spec)).rows()
        self._network = loaded.backbone.network
        masked = make_masked_backbone(self._network, maps=SparseMaps())
        self._denoiser = Denoiser(Networks(backbone=loaded.backbone, strategies=(masked,)))
        self._token = token
        self._recorded: dict[str, list[InMemory]] = {}
        self._masks: dict[float, Tensor] = {}

    def answer(self, *, share: float = 0.0, caching: str = "") -> dict[str, float]:
        """Run one forward.

        Args:
            share: Of tokens that the mask has, with its margin.
            caching: `PLAIN` or one of `CACHINGS`; "" measures the transformers of a UNet.
        """
        if not caching:
            return {"share": self._transformer_share()}
        return {"seconds": self._plain_s()} if caching == PLAIN else self._masked(share, caching)

    def _plain_s(self) -> float:
        return self._denoiser.predict(self._rows).seconds

    def _masked(self, share: float, caching: str) -> dict[str, float]:
        from bottega.addons.edits.engine.activations import EditActivations

        recordings = self._recordings(caching)
        # Masks stay the same tensors, as in an edit's steps.
        mask = self._masks.setdefault(share, _computed(share, self._token))
        edits = [EditActivations(computed=mask, recorded=recorded) for recorded in recordings]
        rows = [replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)]
        seconds = self._denoiser.predict(rows).seconds
        mib = sum(each.size_bytes for each in recordings) / 2**20
        return {"seconds": seconds, "mib": mib, "allowed": self._allowed(mask)}

    def _allowed(self, mask: Tensor) -> float:
        """Return the operations of all blocks over those if transformer blocks compute the mask alone."""
        from bottega.addons.edits.engine.masked.tokens import MaskTokens
        from bottega.addons.edits.engine.masked.work import BlockKind, blocks_of

        tokens, (height, width, prompt_tokens) = MaskTokens(mask), self._rows[0].size
        blocks = blocks_of(self._network, (height, width), prompt_tokens=prompt_tokens)
        sets = [tokens.at(*block.size) if block.kind is BlockKind.TRANSFORMER else None for block in blocks]
        shares = [1.0 if each is None else each.count / each.total for each in sets]
        masked = sum(block.flops_at(share) for block, share in zip(blocks, shares, strict=True))
        return sum(block.flops for block in blocks) / masked

    def _recordings(self, caching: str) -> list[InMemory]:
        """Return what was recorded of each row; keys and values are kept in the first forwards that read it."""
        from bottega.addons.edits.engine.activations import EditActivations
        from bottega.addons.edits.engine.recordings.step import ProjectionsRoom, StepProjections

        if caching not in self._recorded:
            room = ProjectionsRoom(left_bytes=_ROOM_BYTES)
            sinks = [InMemory(StepProjections(room) if caching == "keys_values" else None) for _ in self._rows]
            edits = [EditActivations(sink=sink) for sink in sinks]
            self._denoiser.predict(
                [replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)]
            )
            self._recorded[caching] = sinks
        return self._recorded[caching]

    def _transformer_share(self) -> float:
        from diffusers.models.transformers.transformer_2d import Transformer2DModel

        times: list[float] = []
        handles = []
        for module in self._network.modules():
            if isinstance(module, Transformer2DModel):
                handles.append(module.register_forward_pre_hook(lambda *_: times.append(-perf_counter())))
                handles.append(module.register_forward_hook(lambda *_: times.append(perf_counter())))
        seconds = self._plain_s()
        for handle in handles:
            handle.remove()
        return sum(times) / seconds


class InMemory:
    """Recorded activations of one row, all of them in memory. `projections` are its keys and values, if kept."""

    reused: frozenset[str] = frozenset()
    waited_s = 0.0

    def __init__(self, projections: StepProjections | None) -> None:
        self.projections = projections
        self._outputs: dict[str, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes in half precision of what was recorded, or of the keys and values."""
        if self.projections is not None:
            return self.projections.size_bytes // _FLOAT_BYTES * _HALF_BYTES
        return sum(output.nbytes for output in self._outputs.values())

    def get(self, name: str) -> Tensor | None:
        """Return a layer's output."""
        return self._outputs.get(name)

    stored = get

    def put(self, name: str, output: Tensor) -> None:
        """Keep a copy."""
        self._outputs[name] = output.half()


def _computed(share: float, token: int) -> Tensor:
    """Return the map of latent elements that an edit with this mask computes."""
    import torch

    from bottega.addons.edits.engine.masked.tokens import dilate

    pixels = SIZE // EDIT_SHAPE.sample_size
    mask = torch.from_numpy(square_mask(share, token) > 0)[::pixels, ::pixels]
    return dilate(mask, MARGIN, token // pixels)

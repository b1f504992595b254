"""An engine in this process that edits: what it drew, what it used again, and the pixels as people get them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.masked import tokens
from bottega.addons.edits.engine.recordings.memory import MemoryActivations
from bottega.codec import edits
from bottega.codec.pixels import MaskOrder, Overlay
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import EditRecord, ImageDrawn, JobFailed, JobFinished
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.engine.limits import EngineLimits
from bottega.diffusion.model.model import Model
from bottega.diffusion.spec import EditSpec, ResolvedSpec
from load.bench.edit_cases import EditCase

GUIDANCE_SCALE = 4.0
STRENGTH = 0.9999
FEATHER = 8
MARGIN_TOKENS = 1
_WHITE = 128
_RECORDINGS_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditAsk:
    """One edit. masked: whether it may compute the masked part alone, and else is exact."""

    case: EditCase
    steps: int
    masked: bool

    @property
    def spec(self) -> ResolvedSpec:
        """It, as an engine takes it."""
        width, height = self.case.template.picture.size
        edit = EditSpec(
            mask_digest=_digest(self.case.template.mask),
            image_digest=_digest(self.case.template.picture),
            masked_blocks=self.masked,
        )
        return ResolvedSpec(
            prompt=self.case.prompt,
            num_inference_steps=self.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=width,
            height=height,
            seed=self.case.seed,
            strength=STRENGTH,
            edit=edit,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edited:
    """picture: as Diffusers gives it, without the image's own pixels. denoise_s: turns that it shared count in full.

    record: of one that was exact, an empty one.
    """

    ask: EditAsk
    picture: PIL.Image.Image
    record: EditRecord
    denoise_s: float


class EditEngine:
    """Draws edits with recordings in its memory, as a worker's engine does."""

    def __init__(self, model: Model, *, sparse: bool = True) -> None:
        self.model = model
        self._addon = EngineEdits(model, MemoryActivations(_RECORDINGS_BYTES), sparse=sparse)
        self._engine = Engine(model, EngineLimits(progress_interval_s=0.0), addons=(self._addon,))

    def draw(self, asks: Sequence[EditAsk]) -> list[Edited]:
        """In their order, drawn together."""
        pictures: dict[Hashable, PIL.Image.Image] = {}
        records: dict[Hashable, tuple[EditRecord, float]] = {}
        for number, ask in enumerate(asks):
            self._engine.submit(_order(number, ask))
        while self._engine.busy:
            for event in self._engine.turn():
                match event:
                    case ImageDrawn():
                        pictures[event.key] = PIL.Image.fromarray(event.pixels.numpy())
                    case JobFinished():
                        records[event.key] = event.record.edit or EditRecord(), event.record.seconds["denoise"]
                    case JobFailed():
                        raise event.error
        return [
            Edited(ask=ask, picture=pictures[number], record=records[number][0], denoise_s=records[number][1])
            for number, ask in enumerate(asks)
        ]


def reused_share(drawn: Sequence[Edited]) -> float:
    """Of the transformer blocks of all of them, those that were computed for masked tokens alone."""
    return sum(each.record.blocks_reused for each in drawn) / sum(each.record.blocks_total for each in drawn)


def computed_share(drawn: Sequence[Edited]) -> float:
    """Of the tokens at the finest level of attention, those that were computed."""
    return mean(each.record.computed_share or 1.0 for each in drawn)


def dilated(model: Model, mask: PIL.Image.Image) -> torch.Tensor:
    """The pixels of the tokens that masked blocks compute with this mask: bool [height, width]."""
    scale = model.latent_scale
    latent = torch.from_numpy(np.asarray(mask) >= _WHITE)[::scale, ::scale]
    computed = tokens.dilate(latent, MARGIN_TOKENS, tokens.finest_stride(model.backbone.unet))
    return computed.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def pasted(drawn: PIL.Image.Image, case: EditCase) -> PIL.Image.Image:
    """As people get it by default, read back from its PNG: the template's own pixels outside the mask."""
    overlay = Overlay(
        image=_png(case.template.picture),
        mask=_png(case.template.mask),
        order=MaskOrder(width=drawn.width, height=drawn.height, latent_scale=1),
        keep_unmasked=True,
        feather=FEATHER,
    )
    return PIL.Image.open(io.BytesIO(_png(edits.composed(drawn, overlay)))).convert("RGB")


def beyond_feather(mask: PIL.Image.Image) -> npt.NDArray[np.bool_]:
    """Pixels farther outside the mask than the feather: bool [height, width]."""
    white = np.argwhere(np.asarray(mask) >= _WHITE)
    places = np.moveaxis(np.indices(np.asarray(mask).shape), 0, -1)
    squares = ((places[:, :, None] - white) ** 2).sum(axis=-1)
    return np.asarray(squares.min(axis=-1) > FEATHER**2)


def _order(number: int, ask: EditAsk) -> EngineOrder:
    template = ask.case.template
    return EngineOrder(
        key=number,
        spec=ask.spec,
        image=torch.from_numpy(np.array(template.picture)),
        mask=torch.from_numpy((np.asarray(template.mask) >= _WHITE).astype(np.uint8)),
    )


def _digest(image: PIL.Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()

"""Masked blocks as an add-on of the engine: which jobs have recordings, and what recordings they may share."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from torch import Tensor

from bottega import kinds
from bottega.diffusion.editing.asking import PendingAnswer
from bottega.diffusion.editing.edit import Edit
from bottega.diffusion.editing.job_edits import JobEdits
from bottega.diffusion.editing.keeping import JobKeeping, open_keeping
from bottega.diffusion.editing.loading.kept_blocks import kept_names
from bottega.diffusion.editing.loading.planner import LoadPlanner
from bottega.diffusion.editing.loading.profile import measure_blocks
from bottega.diffusion.editing.loading.times import BlockTimes
from bottega.diffusion.editing.masked.backbone import transformer_blocks
from bottega.diffusion.editing.masked.support import unsupported
from bottega.diffusion.editing.masked.tokens import finest_stride
from bottega.diffusion.editing.order import read_decision, read_order
from bottega.diffusion.editing.prompts import LEAST_COSINE, PromptCosines, measure_prompts
from bottega.diffusion.editing.recordings.image_reader import ImageReader
from bottega.diffusion.editing.recordings.image_recorder import ImageRecorder
from bottega.diffusion.editing.recordings.keys import RecordedControl, RecordingKey
from bottega.diffusion.editing.recordings.mask_levels import MaskLevels
from bottega.diffusion.editing.recordings.projections import ProjectionsRoom
from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording
from bottega.diffusion.editing.recordings.source import ActivationSource, TemplateQuery
from bottega.diffusion.editing.recordings.step_loads import StepLoadCounts
from bottega.diffusion.engine.addon import EngineAddOn, JobAddOn
from bottega.diffusion.engine.encode import Conditions
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.engine.request import Request
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Row
from bottega.diffusion.spec import ResolvedSpec
from bottega.errors import MethodNotServed
from bottega.planning import StepTable
from bottega.v1.activations_pb2 import BlockProfile, ListTemplatesResponse, Template
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

EVENTS = ("blocks_reused", "blocks_total", "blocks_loaded", "blocks_recomputed", "load_wait_ms")

# A store answers within some milliseconds; an edit that waits for one that does not could have computed a step. What an
# earlier attempt has decided is worth more: without it, all of the picture is computed again.
_ANSWER_S = 1.0
_DECIDED_ANSWER_S = 5.0


class EngineEdits(EngineAddOn):
    """source: where recordings are. margin: see MaskLevels. fixed_rows: whether groups always have as many rows.
    sparse: see EngineLimits.sparse_convolutions. template_budget_bytes: that one recording may take, 0 without bound;
    what its source says counts beside it.

    It stands behind those of ControlNets and LoRAs: what they report says whether a recording is worth anything.
    unusable: why masked blocks never are; empty where they may be. cosines: how far blocks follow the prompt; None
    before the first template that would rely on it. step_table: planned seconds of steps that load what they do not
    compute, for the gateway. planner: decides what is loaded. projections_room: of all recordings.
    """

    kind = kinds.ACTIVATIONS

    def __init__(
        self,
        model: Model,
        source: ActivationSource,
        *,
        margin: int = 1,
        fixed_rows: bool = False,
        sparse: bool = True,
        template_budget_bytes: int = 0,
    ) -> None:
        unet = model.backbone.unet
        self.model = model
        self.source = source
        self.unusable = "fixed_rows is set" if fixed_rows else unsupported(unet)
        if not self.unusable and not source.budget_bytes:
            self.unusable = "this worker keeps no activations"
        self.blocks = () if self.unusable else transformer_blocks(unet)
        self.levels = MaskLevels(
            finest=finest_stride(unet),
            deepest=2 ** (len(unet.down_blocks) - 1),
            margin=margin,
            blocks=frozenset(self.blocks),
        )
        self.cosines: PromptCosines | None = None
        self.step_table = StepTable()
        self.template_budget_bytes = template_budget_bytes
        self.times = BlockTimes(unet, sparse=sparse)
        self.planner = LoadPlanner(source, self.times)
        self.projections_room = ProjectionsRoom()
        self._events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))

    @property
    def counts(self) -> Mapping[str, int]:
        """The source's, and of edits: transformer blocks that they have reused, of all that they have had; blocks of
        any kind that took what had to be loaded, and that were computed for want of it; and milliseconds of waiting.
        """
        return {**self.source.counts, **self._events}

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Raises InvalidRequest for an order that nobody could carry out."""
        spec = order.spec
        if spec.edit is None:
            return open_keeping(self, order) if spec.keep_for_editing else None
        if not spec.edit.masked_blocks:
            return None
        return JobEdits(self, order, read_decision(order.decisions))

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """The stores."""
        self.source.set_stores(services)

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Returns when an answer is here, or after the timeout."""
        parts_here = [part for part in parts if isinstance(part, JobEdits | JobKeeping)]
        asked = [part.waiting_for for part in parts_here if part.waiting_for is not None]
        wait(asked, timeout_s, FIRST_COMPLETED)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Says how much room there is for projections, and plans what their next steps load."""
        readers = {request: request.activations for request in requests if not request.done}
        reading = [reader for reader in readers.values() if isinstance(reader, ImageReader)]
        if reading:
            # Once: adding up what all recordings take can be as long as a block.
            self.projections_room.left_bytes = self.source.spare_bytes
        if self.source.load_bytes_per_s is None:
            return False
        others = sum(request.row_count for request, each in readers.items() if not isinstance(each, ImageReader))
        for planned in self.planner.plan(reading, others):
            self.step_table.note(planned.size, planned.row_equivalents, planned.seconds)
        return False

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None) -> bool:
        """Learns what whole rows take."""
        if not self.unusable:
            self.times.observe(rows, seconds)
        return True

    def after_masked_forward(self, rows: Sequence[Row], seconds: float) -> None:
        """Learns what masked rows take."""
        if not self.unusable:
            self.times.observe(rows, seconds)

    def stop(self) -> None:
        """Closes the links of the source."""
        self.source.stop()

    def ask(self, order: EngineOrder, key: RecordingKey, recording: str = "") -> PendingAnswer:
        """Whether a template is recorded. recording: this one alone, that an attempt has decided on."""
        origin = read_order(order).source
        query = TemplateQuery(
            key=key,
            recording=recording,
            would_record=not recording,
            origin=origin,
            width=order.spec.width,
            height=order.spec.height,
        )
        return PendingAnswer(self.source.ask(query), _DECIDED_ANSWER_S if recording else _ANSWER_S)

    def begin(
        self, order: EngineOrder, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None
    ) -> Recording | None:
        """A new recording of an order's template, see ActivationSource."""
        return self.source.begin(key, shape, drawn, origin=read_order(order).source)

    def use_profile(self, recording: Recording) -> None:
        """Plans count with what was measured of the blocks elsewhere, as long as nobody has measured them here."""
        if recording.profile is not None and self.times.profile(recording.shape) is None:
            self.times.use(recording.shape, recording.profile)

    def recorder(self, recording: Recording, request: Request, valid: Tensor) -> ImageRecorder:
        """Records an image into a recording that was begun: as many blocks of each of its steps as it has room for.

        valid: see ImageRecorder.
        """
        bounds = recording.budget_bytes, self.template_budget_bytes, self.source.budget_bytes
        recording.budget_bytes = min(bound for bound in bounds if bound)
        kept = kept_names(
            self.times.blocks(recording.shape),
            budget_bytes=recording.budget_bytes,
            forwards=request.steps_left * request.row_count,
            profile=self.times.profile(recording.shape) or recording.profile,
        )
        return ImageRecorder(self.source, recording, request, valid, kept=kept)

    def profile_blocks(self, width: int, height: int, beat: Callable[[], None]) -> BlockProfile:
        """Measures them here; plans count with it from now on. Raises MethodNotServed where none is ever masked."""
        if self.unusable:
            raise MethodNotServed(f"this worker computes no masked blocks: {self.unusable}")
        scale = self.model.latent_scale
        size = height // scale, width // scale
        profile = measure_blocks(self.model, self.times.blocks(size), size, sparse=self.times.sparse, beat=beat)
        self.times.use(size, profile)
        return profile

    def list_templates(self) -> ListTemplatesResponse:
        """The one used last first."""
        recordings = self.source.recordings
        return ListTemplatesResponse(
            templates=[self._template(recording) for recording in recordings],
            used_bytes=sum(recording.size_bytes for recording in recordings),
            budget_bytes=self.source.budget_bytes,
        )

    def drop_templates(self, prefix: str) -> int:
        return self.source.drop(prefix)

    def key(self, order: EngineOrder, template: str = "") -> RecordingKey:
        """What an order's recordings are found by. template: see RecordingKey; empty is that of the order's image."""
        spec = order.spec
        return RecordingKey(
            tenant=read_order(order).tenant,
            model_hash=self.model.digest,
            dtype=self.model.dtype_name,
            template=template or ("" if order.image is None else _digest(order.image)),
            weights=tuple(sorted((lora.digest, float(lora.scale)) for lora in spec.loras)),
            controls=tuple(
                RecordedControl(
                    digest=control.digest,
                    image_digest=_control_digest(order, place),
                    scale=float(control.controlnet_conditioning_scale),
                    guess_mode=control.guess_mode,
                )
                for place, control in enumerate(spec.controlnets)
            ),
        )

    def follow_prompts(self, spec: ResolvedSpec, conditions: Conditions, edit: Edit) -> bool:
        """Whether blocks follow the prompt so far that an edit cannot take what was computed with another one.

        It is measured the first time, in one forward of two rows.
        """
        if self.cosines is None:
            self.cosines = measure_prompts(self.model, spec, conditions, edit, self.blocks)
            facts = {"cosine": round(self.cosines.mean, 3), "reliable": self.cosines.reliable}
            _log.info("measured how far blocks follow the prompt", extra=facts)
        return not self.cosines.reliable

    @property
    def said_cosine(self) -> str:
        """How far blocks follow the prompt, in words."""
        if self.cosines is None:
            return "not measured"
        return f"cosine {self.cosines.mean:.2f}, below {LEAST_COSINE:g}"

    def _template(self, recording: Recording) -> Template:
        height, width = recording.shape
        return Template(
            id=recording.id,
            digest=recording.key.template,
            model=self.model.name,
            model_hash=recording.key.model_hash,
            width=width * self.model.latent_scale,
            height=height * self.model.latent_scale,
            size_bytes=recording.size_bytes,
            steps=recording.step_count,
            uses=recording.uses,
            idle_s=max(0.0, time.monotonic() - recording.used_s),
            in_use=not recording.is_idle,
            recording=not recording.complete,
            valid_share=recording.valid_share,
        )

    def note_loads(self, counts: StepLoadCounts) -> None:
        """Of a step that was made."""
        self._events["blocks_loaded"] += counts.loaded
        self._events["blocks_recomputed"] += counts.recomputed
        self._events["load_wait_ms"] += round(counts.waited_s * 1000)

    def note_blocks(self, reused: int, total: int) -> None:
        """An edit's step could have reused so many blocks in all, and did reuse some."""
        self._events["blocks_reused"] += reused
        self._events["blocks_total"] += total


def _control_digest(order: EngineOrder, place: int) -> str:
    """Of one ControlNet's image: the file's, or that of the part that is drawn, which the file does not say."""
    edit = order.spec.edit
    if edit is None or edit.padding_mask_crop is None:
        return order.spec.controlnets[place].image_digest
    return _digest(order.control_images[place])


def _digest(image: Tensor) -> str:
    """Of an image's pixels, uint8 [height, width, 3], hex."""
    total = hashlib.sha256(repr(tuple(image.shape)).encode())
    total.update(image.contiguous().cpu().numpy().data)
    return total.hexdigest()

"""The engine add-on for edits: it gives jobs their recordings and decides which jobs may share one."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from torch import Tensor

from bottega import kinds
from bottega.addons.edits.engine.job_edits import JobEdits
from bottega.addons.edits.engine.kept import JobKeeping, open_keeping
from bottega.addons.edits.engine.masked.backbone import make_masked_backbone, transformer_blocks
from bottega.addons.edits.engine.masked.checks import (
    LEAST_COSINE,
    PromptCosines,
    masked_probe,
    measure_prompts,
    unsupported,
)
from bottega.addons.edits.engine.masked.feature_maps import FullMaps
from bottega.addons.edits.engine.masked.tokens import MaskLevels, deepest_stride, finest_stride
from bottega.addons.edits.engine.order import PendingAnswer, read_decision, read_order
from bottega.addons.edits.engine.planner import LoadPlanner
from bottega.addons.edits.engine.profile import kept_names, measure_blocks
from bottega.addons.edits.engine.recordings.image_reader import ImageReader
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, RecordedControl, Recording, RecordingKey
from bottega.addons.edits.engine.recordings.source import ActivationSource, TemplateQuery
from bottega.addons.edits.engine.recordings.step import ProjectionsRoom
from bottega.addons.edits.engine.recordings.step_access import ImageRecorder, StepLoadCounts
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.addons.edits.engine.times import BlockTimes
from bottega.device.heartbeat import Heartbeat
from bottega.engine.addon import EngineAddOn, JobAddOn, add_counts
from bottega.engine.encode import Conditions
from bottega.engine.engine import Engine
from bottega.engine.job import EngineOrder
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import MethodNotServed, Unavailable
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.planning import StepTable
from bottega.v1.activations_pb2 import (
    BlockProfile,
    DropTemplateResponse,
    ListTemplatesResponse,
    ProfileBlocksResponse,
    Template,
    TemplateCall,
)
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

EVENTS = ("blocks_reused", "blocks_total", "blocks_loaded", "blocks_recomputed", "load_wait_ms")

# A store usually answers within a few milliseconds. While an edit waits for a slow one, it could have computed a step.
# The decision of an earlier attempt is worth a longer wait: without its recording, the whole picture is computed again.
_ANSWER_S = 1.0
_DECIDED_ANSWER_S = 5.0


class EngineEdits(EngineAddOn):
    """The engine add-on that lets edits reuse recorded activations, and that records them.

    It must come after the add-ons for ControlNets and LoRAs, because their reports decide whether a recording is
    usable.

    Args:
        margin: Width in tokens of the margin around a mask that is computed too.
        fixed_rows: Whether every batch has the same number of rows; edits then compute everything.
        sparse: Whether convolutions of edits compute only the area around the mask.
        template_budget_bytes: Maximum bytes of one recording, in addition to the source's own limit; 0 for none.
        heartbeat: Shows that the engine is alive during forward passes of masked rows.
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
        heartbeat: Heartbeat | None = None,
    ) -> None:
        network = model.backbone.network
        self.model = model
        self.source = source
        self.unusable = "fixed_rows is set" if fixed_rows else unsupported(network)
        """Why this worker always computes all tokens of edits, as a clause; empty if it can compute only masked
        ones."""
        if not self.unusable and not source.budget_bytes:
            self.unusable = "this worker keeps no activations"
        self.blocks = () if self.unusable else transformer_blocks(network)
        self.levels = MaskLevels(
            finest=finest_stride(network),
            deepest=deepest_stride(network),
            margin=margin,
            blocks=frozenset(self.blocks),
        )
        self.cosines: PromptCosines | None = None
        """How much the outputs of blocks depend on the prompt; None until the first edit for which this is measured."""
        self.step_table = StepTable()
        """Planned seconds of steps that load activations, for the gateway."""
        self.template_budget_bytes = template_budget_bytes
        self.times = BlockTimes(network, sparse=sparse)
        if not self.unusable:
            self.probes = {"masked": masked_probe}
            self.strategy = make_masked_backbone(
                network,
                maps=SparseMaps() if sparse else FullMaps(),
                beat=None if heartbeat is None else heartbeat.beat,
                operations=model.operations,
                memory=model.memory,
            )
        self.planner = LoadPlanner(source, self.times)
        self.projections_room = ProjectionsRoom()
        """Memory for cached keys and values, shared by all recordings."""
        self.projects_by_prompt = model.unet is None
        """Whether keys and values depend on the prompt as well: transformers scale their inputs by it."""
        self._events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events of the source, and of edits, by the names in `EVENTS`.

        Reused and total blocks are transformer blocks. Loaded blocks, of any kind, used activations that were loaded
        from a store. Recomputed blocks were recorded, but computed because their activations arrived too late.
        """
        return {**self.source.counts, **self._events}

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add counts, sizes and the times from which the gateway estimates edits to the engine's periodic report."""
        add_counts(beat, self.kind, self.counts)
        recordings = self.source.recordings
        beat.metrics.add(name="bottega_worker_recordings", text="Templates recorded for edits.", value=len(recordings))
        beat.metrics.add(
            name="bottega_worker_activation_bytes",
            text="Bytes of recorded block outputs of templates.",
            value=sum(recording.size_bytes for recording in recordings),
        )
        if self.unusable:
            return
        beat.mask_tokens.token_elements, beat.mask_tokens.margin_tokens = self.levels.finest, self.levels.margin
        known = {(times.latent_height, times.latent_width): times for times in beat.masked_times}
        for shape, rows, seconds in self.step_table.entries():
            if shape not in known:
                known[shape] = beat.masked_times.add(latent_height=shape[0], latent_width=shape[1])
            known[shape].planned.add(rows=rows, seconds=seconds)

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Return the add-on's object for one job; None if the job neither reads nor records activations.

        Raise InvalidRequest if the gateway's message about activations, or an earlier attempt's decision, is malformed.
        """
        spec = order.spec
        if spec.edit is None:
            return open_keeping(self, order) if spec.keep_for_editing else None
        if not spec.edit.masked_blocks or (self.model.unet is not None and self.model.image_channels):
            return None  # A UNet that reads the mask computes the whole picture.
        return JobEdits(self, order, read_decision(order.decisions))

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the addresses of the activation stores."""
        self.source.set_stores(services)

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until a store responds to one of the jobs' queries, or until the time-out."""
        parts_here = [part for part in parts if isinstance(part, JobEdits | JobKeeping)]
        asked = [part.waiting_for for part in parts_here if part.waiting_for is not None]
        wait(asked, timeout_s, FIRST_COMPLETED)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Set the memory for cached projections, and plan the loads of the next steps."""
        readers = {request: request.activations for request in requests if not request.done}
        reading = [reader for reader in readers.values() if isinstance(reader, ImageReader)]
        if reading:
            # Once per group: adding up the sizes of all recordings can take as long as computing a block.
            self.projections_room.left_bytes = self.source.spare_bytes
        if self.source.load_bytes_per_s is None:
            return False
        others = sum(request.row_count for request, reader in readers.items() if not isinstance(reader, ImageReader))
        for planned in self.planner.plan(reading, others):
            self.step_table.note(planned.size, planned.row_equivalents, planned.seconds)
        return False

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Update the estimates of step times from a forward pass."""
        if not self.unusable:
            self.times.observe(rows, seconds)
        return True

    def answer(self, question: bytes, engine: Engine) -> bytes:
        """Answer a query from the worker's front, a serialized TemplateCall."""
        call = TemplateCall.FromString(question)
        response: ListTemplatesResponse | DropTemplateResponse | ProfileBlocksResponse
        match call.WhichOneof("request"):
            case "drop":
                response = DropTemplateResponse(dropped=self.source.drop(call.drop.id))
            case "profile":
                profile = self.profile_blocks(engine, call.profile.width, call.profile.height)
                response = ProfileBlocksResponse(profile=profile)
            case _:
                response = self.list_templates()
        return response.SerializeToString()

    def ask(self, order: EngineOrder, key: RecordingKey, recording: str = "") -> PendingAnswer:
        """Ask the source whether a template is recorded. `recording` is the only acceptable one; empty for any."""
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
        """Begin to record a job's template; see `ActivationSource.begin`."""
        return self.source.begin(key, shape, drawn, origin=read_order(order).source)

    def use_profile(self, recording: Recording) -> None:
        """Use a recording's block profile for planning, unless one for its size is already used."""
        if recording.profile is not None and self.times.profile(recording.shape) is None:
            self.times.use(recording.shape, recording.profile)

    def recorder(self, recording: Recording, request: Request, valid: Tensor) -> ImageRecorder:
        """Return a recorder for a recording that was begun, limited to the blocks that fit into its budget."""
        bounds = recording.budget_bytes, self.template_budget_bytes, self.source.budget_bytes
        recording.budget_bytes = min(bound for bound in bounds if bound)
        kept = kept_names(
            self.times.blocks(recording.shape),
            budget_bytes=recording.budget_bytes,
            forwards=request.evaluations_left * request.row_count,
            profile=self.times.profile(recording.shape) or recording.profile,
        )
        return ImageRecorder(self.source, recording, request, valid, kept=kept)

    def profile_blocks(self, engine: Engine, width: int, height: int) -> BlockProfile:
        """Measure the blocks for pictures of a size, and use the result for planning.

        Args:
            engine: The engine of this add-on, which must have no work.
            width: Width in pixels; 0 is the model's own.
            height: Height in pixels; 0 is the model's own.

        Raises:
            Unavailable: The engine has work, which would distort the measurement.
            InvalidRequest: The model cannot draw this size.
            TooLarge: This worker does not draw such large pictures.
            MethodNotServed: This worker always computes all tokens of edits.
        """
        if engine.busy:
            raise Unavailable("this worker draws pictures now; blocks can only be measured while it is idle")
        defaults = self.model.defaults
        width, height = width or defaults.width, height or defaults.height
        spec = ResolvedSpec(
            prompt="",
            num_inference_steps=defaults.num_inference_steps,
            width=width,
            height=height,
            sampler=defaults.sampler,
            use_karras_sigmas=defaults.use_karras_sigmas,
        )
        engine.check_drawable(spec)
        if self.unusable:
            raise MethodNotServed(f"this worker always computes all tokens of edits: {self.unusable}")
        scale = self.model.latent_scale
        size = height // scale, width // scale
        profile = measure_blocks(self.model, self.times.blocks(size), size, sparse=self.times.sparse, beat=engine.beat)
        self.times.use(size, profile)
        return profile

    def list_templates(self) -> ListTemplatesResponse:
        """Return the recorded templates, most recently used first."""
        recordings = self.source.recordings
        return ListTemplatesResponse(
            templates=[self._template(recording) for recording in recordings],
            used_bytes=sum(recording.size_bytes for recording in recordings),
            budget_bytes=self.source.budget_bytes,
        )

    def key(self, order: EngineOrder, template: str = "") -> RecordingKey:
        """Return the key of a job's recordings. If `template` is empty, the digest of the job's image is used."""
        spec = order.spec
        return RecordingKey(
            tenant=read_order(order).tenant,
            model_hash=self.model.digest,
            dtype=self.model.dtype_name,
            template=template or ("" if order.image is None else _digest(order.image, self._latent_settings(spec))),
            weights=tuple(sorted((lora.digest, float(lora.scale)) for lora in spec.loras)),
            controls=tuple(
                RecordedControl(
                    digest=control.digest,
                    image_digest=_control_digest(order, place),
                    scale=float(control.controlnet_conditioning_scale),
                    guess_mode=control.guess_mode,
                    control_mode=control.control_mode,
                )
                for place, control in enumerate(spec.controlnets)
            ),
        )

    def _latent_settings(self, spec: ResolvedSpec) -> str:
        """Return the settings that decide how latents outside the mask change; "" if these latents are put back."""
        return repr((spec.strength, spec.num_inference_steps, spec.sampling)) if self.model.image_channels else ""

    def blocks_depend_on_prompt(self, spec: ResolvedSpec, conditions: Conditions, request: Request) -> bool:
        """Return whether blocks depend on the prompt so much that an edit must not reuse another prompt's activations.

        The first call measures the dependence, in one forward pass of two rows.
        """
        if self.cosines is None:
            self.cosines = measure_prompts(self.model, spec, conditions, request, self.blocks)
            facts = {"cosine": round(self.cosines.mean, 3), "reliable": self.cosines.reliable}
            _log.info("measured how much the outputs of blocks depend on the prompt", extra=facts)
        return not self.cosines.reliable

    @property
    def cosine_text(self) -> str:
        """How much the outputs of blocks depend on the prompt, as text."""
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
        """Add the loads of a finished step to the counts."""
        self._events["blocks_loaded"] += counts.loaded
        self._events["blocks_recomputed"] += counts.recomputed
        self._events["load_wait_ms"] += round(counts.waited_s * 1000)

    def note_blocks(self, reused: int, total: int) -> None:
        """Add to the counts how many blocks a finished step reused, and how many it could have reused."""
        self._events["blocks_reused"] += reused
        self._events["blocks_total"] += total


def _control_digest(order: EngineOrder, place: int) -> str:
    """Return the digest of one ControlNet's image: of the cropped image if the edit crops, else of the file."""
    edit = order.spec.edit
    if edit is None or edit.padding_mask_crop is None:
        return order.spec.controlnets[place].image_digest
    return _digest(order.control_images[place])


def _digest(image: Tensor, latent_settings: str = "") -> str:
    """Return the SHA-256, in hex, of an image's shape and pixels, uint8 [height, width, 3], and of `latent_settings`.

    `latent_settings` are the settings that decide how latents outside the mask change (see `_latent_settings`); "" if
    they are not needed.
    """
    total = hashlib.sha256(f"{tuple(image.shape)}{latent_settings}".encode())
    total.update(image.contiguous().cpu().numpy().data)
    return total.hexdigest()

"""The engine add-on for LoRAs: they are requested when a job arrives. All images of a job use them from one step on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from bottega import kinds
from bottega.addons.loras.engine import (
    LoraAtScale,
    LoraRef,
    LoraSet,
    LoraSource,
    LoraWeights,
    SetKey,
)
from bottega.addons.loras.engine.embeddings import PromptEmbeddings
from bottega.addons.loras.engine.job_loras import JobLoras, _is_ready
from bottega.addons.loras.engine.lora_set import RemoteLoras, read_loras
from bottega.addons.loras.engine.patching import patch_probe
from bottega.addons.loras.engine.unmerged import STACKED_BYTES
from bottega.device.device import PausableWork
from bottega.engine.addon import EngineAddOn, JobAddOn, add_counts
from bottega.engine.encode import Conditions
from bottega.engine.job import EngineOrder
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.request import Request
from bottega.engine.spec import EmbeddingSpec, LoraSpec
from bottega.engine.waiting import new_requests
from bottega.errors import InternalError, Unavailable
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress

# How long sets for the denoising network are made in a turn: so many seconds, or this share of a step if that is more.
_MIN_PIECES_S = 0.02
_SHARE_OF_STEP = 0.25


class EngineLoras(EngineAddOn):
    """The engine's add-on for LoRAs.

    Args:
        model: The model that LoRAs change.
        source: Provides LoRAs; None if the worker has no LoRAs.
        patches, merges_half, pristine_on_host, stacked_bytes: See LoraWeights.
        timeout_s: Seconds that a job waits for its LoRAs.
        clock: Monotonic time in seconds.
    """

    kind = kinds.LORAS

    def __init__(
        self,
        model: Model,
        source: LoraSource | None,
        *,
        patches: bool = True,
        merges_half: bool = False,
        pristine_on_host: bool = False,
        stacked_bytes: int = STACKED_BYTES,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.weights = LoraWeights(
            model,
            patches=patches,
            merges_half=merges_half,
            pristine_on_host=pristine_on_host,
            stacked_bytes=stacked_bytes,
        )
        self.row_weights = self.weights
        self.probes = {"patch": patch_probe}
        self.embeddings = PromptEmbeddings(model)
        self.pipeline = model.family.pipeline
        """Diffusers' pipeline for the model's family; each pipeline has its own loader of LoRAs."""
        self._model = model
        self._source = source
        self._timeout_s = timeout_s
        self._clock = clock
        self._parts: dict[Request, JobLoras] = {}
        self._events = Counter(hits=0, misses=0)
        # Jobs hold the makings that they wait for.
        self._making: WeakValueDictionary[SetKey, PausableWork[LoraSet]] = WeakValueDictionary()
        self._turn_s: float | None = None  # `now_s` of the last turn in which a set was made
        self._forward_s = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of requested LoRAs: `hits` were in this process's memory, `misses` had to be fetched from a store."""
        return self._events

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the counts, and the measured cost of merging other LoRAs, to the engine's periodic report."""
        add_counts(beat, self.kind, self.counts)
        if self.weights.swap_s is not None:
            beat.switch_times.add(kind=self.kind, seconds=self.weights.swap_s)
        beat.metrics.add(
            name="bottega_worker_lora_swaps",
            text="Number of times that LoRAs were merged into the denoiser's weights or removed from them.",
            value=self.weights.swaps,
            counts=True,
        )
        beat.metrics.add(
            name="bottega_worker_lora_pristine_bytes",
            text="Bytes of the copies from which weights are restored.",
            value=self.weights.pristine_bytes,
        )

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the LoRA stores that are in the fleet now."""
        if self._source is not None:
            self._source.set_stores(services)

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Request the LoRAs of a job. Raise Unavailable if this worker has no source of LoRAs."""
        spec = order.spec
        return self.ask(spec.loras, spec.embeddings, bound=spec.lora_bound, step=spec.lora_step)

    def ask(
        self,
        specs: Sequence[LoraSpec],
        embeddings: Sequence[EmbeddingSpec] = (),
        *,
        bound: int = 0,
        step: int | None = None,
    ) -> JobLoras | None:
        """Request the LoRAs and embeddings of a job, or return None if it has none.

        Raises Unavailable if this worker has no source of LoRAs.

        Args:
            specs: The LoRAs.
            embeddings: The embeddings.
            bound: The first step that must not be made without the LoRAs.
            step: The step from which they are used, if an earlier attempt has decided it; else None.
        """
        if not specs and not embeddings:
            return None
        if self._source is None:
            raise Unavailable("this worker has no LoRAs")
        since_s = self._clock()
        refs = [LoraRef(name=spec.name, digest=spec.digest) for spec in specs]
        refs += [LoraRef(name=spec.name, digest=spec.digest) for spec in embeddings]
        handles = tuple(self._source.begin(ref) for ref in refs)
        for handle in handles:
            self._events["hits" if _is_ready(handle) else "misses"] += 1
        return JobLoras(
            addon=self,
            source=self._source,
            specs=tuple(specs),
            embeddings=tuple(embeddings),
            refs=tuple(refs),
            handles=handles,
            since_s=since_s,
            timeout_s=self._timeout_s,
            bound=bound,
            step=step,
        )

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> JobAddOn:
        """Request the LoRAs of another worker's job, for which this worker computes rows.

        The other worker decides for each row from which step the LoRAs are used.
        """
        loras = self.ask(read_loras(part), step=0)
        assert loras is not None, "a part names at least one"
        return RemoteLoras(loras)

    def making(self, uses: Sequence[LoraAtScale]) -> PausableWork[LoraSet]:
        """Return the making of a set for the denoising network, which all jobs that use it share.

        It ends with the last one.
        """
        key = self.weights.key_of(uses)
        work = self._making.get(key)
        if work is None or work.failed:
            work = self._making[key] = PausableWork(self._model.runtime, self.weights.denoiser_set_in_pieces(uses))
        return work

    def go_on(self, work: PausableWork[LoraSet], now_s: float) -> None:
        """Make more of a set.

        Low-rank factors are made at once. For differences of whole weights, all sets together take at most a quarter of
        the time of a step in a turn, or one piece if that takes longer, so that the steps of jobs that run go on.

        Args:
            now_s: Time at which the engine began to update the jobs of this turn.
        """
        if not work.spans:
            work.run(lambda: True)  # It pauses before the first difference.
        due_s = now_s + max(_MIN_PIECES_S, _SHARE_OF_STEP * self._forward_s)
        if work.result is None and (self._turn_s != now_s or self._clock() <= due_s):
            self._turn_s = now_s
            work.run(lambda: self._clock() > due_s)

    def before_prompt(self, part: JobAddOn | None) -> None:
        """Make the text encoders use this job's LoRAs and embeddings.

        Raises:
            LoraUnusable: One does not fit.
            InternalError: One changes text encoders, and those of this worker have no weights.
        """
        self.embeddings.restore()
        text = part.take_text_set() if isinstance(part, JobLoras) else None
        if text is not None and not self._model.encodes:
            raise InternalError("a LoRA of text encoders came to a worker without them")
        seconds = self.weights.put_in_text(text)
        if isinstance(part, JobLoras) and text is not None:
            part.note_patch("into the text encoders", seconds)
            part.changes_prompt = True
        if isinstance(part, JobLoras) and part.embeddings:
            part.tokenizers = self.embeddings.put(part.token_vectors())
            part.changes_prompt = True

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until more of the jobs' LoRAs has arrived or one has failed, or until the time-out."""
        if any(isinstance(part, JobLoras) and part.making is not None for part in parts):
            return  # In this turn, one of them made a part of its set.
        if self._source is not None:
            handles = [handle for part in parts if isinstance(part, JobLoras) for handle in part.handles]
            self._source.settle(handles, timeout_s)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Merge LoRAs into the denoising network, or restore its weights, whichever is best for all requests."""
        if not self.weights.patched and not any(request.loras_now or request.key.weights for request in requests):
            return False
        seconds = self.weights.choose(
            [request.loras_now for request in requests],
            steps=max(request.evaluations_left for request in requests),
            step_s=step_s,
        )
        patched = self.weights.patched
        # The time is charged to each job whose set was merged. Restoring the weights is charged to no job.
        for part in {self._parts[request] for request in requests if request.loras_now is not None}:
            if part.loras is patched and seconds:
                part.note_patch("into the weights", seconds)
        moved = [request for request in requests if request.share_weights(self._weights_of(request))]
        return bool(moved)

    def _weights_of(self, request: Request) -> SetKey:
        """Return the set of LoRAs for `GroupKey.weights`, with which requests must agree to share a forward pass.

        It is the set that is merged into the weights. A set that changes norms is never computed for some rows alone,
        so that a request with one has its own set as the key, even where it is not merged.
        """
        loras = request.loras_now
        return loras.key if loras is not None and loras.changes_norms else self.weights.patched_key

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Measure the cost of unmerged LoRAs from the time of a forward pass without masked rows."""
        self._forward_s = seconds
        return masked or self.weights.observe_forward([row.loras for row in rows], seconds, plain_s)

    def warm_up(self, row: Row, predict: Callable[[Sequence[Row]], object]) -> None:
        """Measure the costs of unmerged and merged LoRAs with a LoRA that changes nothing."""
        if self._source is None:
            return
        probe = self.weights.probe()
        for _ in range(3):
            predict([replace(row, loras=probe)])
        self.weights.measure_swap()

    def now_s(self) -> float:
        """Return the time on the add-on's clock."""
        return self._clock()

    def attach(self, part: JobLoras, requests: Sequence[Request]) -> None:
        """Associate these requests with their job's LoRAs, until `detach`."""
        self._parts |= dict.fromkeys(requests, part)

    def detach(self, requests: Sequence[Request]) -> None:
        """Drop requests that have ended. Unknown ones are ignored."""
        for request in requests:
            self._parts.pop(request, None)

    def shadows(self, order: EngineOrder, conditions: Conditions) -> Sequence[Request]:
        """Return more requests without LoRAs in the denoising network, if the order asks to measure a LoRA's effect."""
        return (
            new_requests(self._model, order, [conditions] * order.spec.num_images) if order.spec.loras_measured else ()
        )

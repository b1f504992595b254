"""The LoRAs of one job: asked for when it comes, in force from one step of all its images on.

Knows the job's spec and whoever brings LoRAs; knows no groups, and not how LoRAs are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega.diffusion.engine.events import LoraRecord
from bottega.diffusion.engine.request import Request
from bottega.diffusion.loras import (
    TEXT_ENCODERS,
    UNET,
    LoraHandle,
    LoraRef,
    LoraSet,
    LoraSource,
    LoraStore,
    LoraWeights,
    ScaledLora,
)
from bottega.diffusion.spec import LoraSpec
from bottega.errors import NoLora, Unavailable


@dataclass(slots=True, kw_only=True, eq=False)
class JobLoras:
    """Without a source there are none. since_s: when they were asked for; timeout_s: how long they may take.

    bound: the step that no image makes without them. step: that at which they go in, once it is decided.
    wait_s, patch_s: see LoraRecord.
    """

    source: LoraSource | None = None
    specs: tuple[LoraSpec, ...] = ()
    handles: tuple[LoraHandle, ...] = ()
    since_s: float = 0.0
    timeout_s: float = 0.0
    bound: int = 0
    step: int | None = None
    loras: LoraSet | None = None
    wait_s: float = 0.0
    patch_s: float = 0.0
    _load_s: tuple[float, ...] = ()
    _waiting_since_s: float | None = field(default=None, repr=False)

    @property
    def pending(self) -> bool:
        """Whether some are still to come."""
        return self.source is not None and self.loras is None

    def text_ready(self, now_s: float) -> bool:
        """Whether the prompt can be encoded. Raises the BottegaError for which it never can."""
        there = self._there([handle.text_ready for handle in self.handles], now_s)
        self._note_wait(None if there else now_s, now_s)
        return there

    def text_set(self, weights: LoraWeights) -> LoraSet | None:
        """What they do to the text encoders; None where they leave them alone. Raises LoraUnusable."""
        if not self.handles:
            return None
        made = weights.text_set(self._uses(TEXT_ENCODERS))
        return made if any(made.of(name) for name in TEXT_ENCODERS) else None

    def arrive(self, weights: LoraWeights, requests: Sequence[Request], now_s: float) -> bool:
        """Puts them into the requests if all are here; whether that was now.

        They go in at one step of all images: the first that none of them has begun, where none is pinned.
        Raises the BottegaError for which they never will be here, LoraUnusable or NoLora among them.
        """
        if not self.pending or not self._there([handle.ready for handle in self.handles], now_s):
            return False
        self.loras = weights.unet_set(self._uses((UNET,)))
        if self.step is None:
            self.step = max(request.step for request in requests)
        for request in requests:
            request.loras, request.loras_from = self.loras, self.step
        self._note_wait(None, now_s)
        self.close()
        return True

    def block(self, requests: Sequence[Request], now_s: float) -> set[Request]:
        """Those that cannot make their next step without them."""
        last = self.bound if self.step is None else self.step
        blocked = {request for request in requests if self.pending and not request.done and request.step >= last}
        under_way = sum(not request.done for request in requests)
        self._note_wait(now_s if blocked and len(blocked) == under_way else None, now_s)
        return blocked

    def close(self) -> None:
        """Nobody needs what the source has any more. Harmless the second time."""
        if self.source is not None and self.handles:
            self._load_s = tuple(handle.load_s for handle in self.handles)
            self.source.close(self.handles)
            self.handles = ()

    def records(self, similarities: tuple[float, ...] = ()) -> tuple[LoraRecord, ...]:
        """What they came to; nothing before they are in. similarities: what was measured of all of them together."""
        if self.step is None or self.loras is None:
            return ()
        return tuple(
            LoraRecord(
                name=spec.name,
                digest=spec.digest,
                scale=spec.scale,
                from_step=self.step,
                load_s=load_s,
                wait_s=self.wait_s,
                patch_s=self.patch_s,
                similarities=similarities if spec.measured else (),
            )
            for spec, load_s in zip(self.specs, self._load_s, strict=True)
        )

    def _uses(self, components: Sequence[str]) -> list[ScaledLora]:
        return [
            ScaledLora(digest=spec.digest, scale=spec.scale, layers={name: handle.layers(name) for name in components})
            for spec, handle in zip(self.specs, self.handles, strict=True)
        ]

    def _there(self, ready: Sequence[bool], now_s: float) -> bool:
        if all(ready):
            return True
        if now_s - self.since_s > self.timeout_s:
            late = [spec.name for spec, here in zip(self.specs, ready, strict=True) if not here]
            raise NoLora(
                f"not here within {self.timeout_s:g} s: LoRA {', '.join(late)}; is the LoRA store slow, or down?",
                metadata={"loras": ",".join(late)},
            )
        return False

    def _note_wait(self, waiting_since_s: float | None, now_s: float) -> None:
        """Counts a wait that has ended, or notes one that begins."""
        if self._waiting_since_s is not None and waiting_since_s is None:
            self.wait_s += now_s - self._waiting_since_s
        if self._waiting_since_s is None or waiting_since_s is None:
            self._waiting_since_s = waiting_since_s


def ask_for_loras(
    source: LoraSource | None,
    specs: Sequence[LoraSpec],
    stores: tuple[LoraStore, ...],
    *,
    now_s: float,
    timeout_s: float,
    bound: int = 0,
    step: int | None = None,
) -> JobLoras:
    """Asks for a job's LoRAs, in these stores. Raises Unavailable where nobody brings any."""
    if not specs:
        return JobLoras()
    if source is None:
        raise Unavailable("this worker has no LoRAs")
    refs = [LoraRef(name=spec.name, digest=spec.digest, stores=stores) for spec in specs]
    return JobLoras(
        source=source,
        specs=tuple(specs),
        handles=tuple(source.begin(ref) for ref in refs),
        since_s=now_s,
        timeout_s=timeout_s,
        bound=bound,
        step=step,
    )

"""The engine of the bench of loading, in a process of its own: edits of one template, whose recording is in a store.

`python -m load.bench.edit_loading_engine --model FOLDER --threads N --store HOST:PORT` answers one JSON line for each
that it is given: a LoadingAsk.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from load.bench.edit_model import square_mask
from load.bench.side_process import SideProcess, serve

if TYPE_CHECKING:
    from bottega.diffusion.engine.events import EngineRecord
    from bottega.transport import ServiceOffer

RECORD = "record"
NO_CACHE = "no_cache"
LOAD_FREE = "load_free"
# Of all recordings in this process.
_ACTIVATIONS_BYTES = 4 << 30
_UPLOAD_BYTES = 2 << 30
_LINK_S = 30.0
# Until an engine that waits for a store's answer is looked at again.
_LOOK_S = 0.001
# A relay holds up what keeps links alive behind all that is on its way.
_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingAsk:
    """One edit. way: RECORD, which computes all and records; NO_CACHE, which computes all; LOAD_FREE, of a recording in
    memory; or one of the planners of loading_policies, of a recording that is nowhere but in the store.

    share: of tokens that its mask has, with its margin.
    """

    way: str
    share: float
    steps: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """steps_s: from the prompt's encoding to the last step's end. reused: share of transformer blocks of which only
    masked tokens were computed. loaded, recomputed: blocks that took what had to be loaded, and that were recorded and
    computed. waited_s: for loads, of steps_s. load_bytes: that came. r2: see WorkFit; 0 where it does not say."""

    steps_s: float
    reused: float = 0.0
    loaded: int = 0
    recomputed: int = 0
    waited_s: float = 0.0
    load_bytes: int = 0
    r2: float = 0.0


class LoadingEngine(SideProcess):
    """The engine's process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int, store: str) -> None:
        super().__init__("load.bench.edit_loading_engine", "--model", model, "--threads", threads, "--store", store)

    def edit(self, ask: LoadingAsk) -> Loaded:
        """Draws."""
        said = self.ask(asdict(ask))
        counted = {name: int(said[name]) for name in ("loaded", "recomputed", "load_bytes")}
        return Loaded(**{**said, **counted})  # type: ignore[arg-type]  # the numbers that are no counts


class StoreOffers:
    """An OfferSource: asks the store itself, as a worker's front does for its engine."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="offers")

    def request(self, kind: str, address: str, link_id: str, terms: object = None) -> Future[ServiceOffer]:
        """See OfferSource."""
        return self._threads.submit(_offer, kind, address, link_id)


def _offer(kind: str, address: str, link_id: str) -> ServiceOffer:
    import grpc

    from bottega.rpc.channel import channel_options
    from bottega.transport import ServiceOffer, offer_from_wire
    from bottega.v1.link_pb2 import OpenLinkRequest
    from bottega.v1.link_pb2_grpc import LinkServiceStub

    with grpc.insecure_channel(address, options=channel_options()) as channel:
        asked = OpenLinkRequest(kind=kind, worker="bench", link_id=link_id)
        answer = LinkServiceStub(channel).OpenLink(asked, timeout=_LINK_S)
    return ServiceOffer(offer=offer_from_wire(answer.offer), service=answer.service)


class EditLoading:
    """Engines with recordings in memory, and in the store behind a link."""

    def __init__(self, model: Path, store: str) -> None:
        import torch

        from bottega.addons.edits.engine.addon import EngineEdits
        from bottega.addons.edits.engine.recordings.memory import MemoryActivations
        from bottega.addons.edits.worker import ActivationLinkSettings, ActivationSettings, StoreActivations
        from bottega.diffusion.engine.engine import Engine
        from bottega.diffusion.engine.limits import EngineLimits
        from bottega.diffusion.model.model import load_model
        from bottega.transport import LinkCounters
        from bottega.v1.fleet_pb2 import ServiceAddress
        from load.bench.edit_model import SIZE
        from load.bench.edit_steps import template
        from load.bench.loading_policies import planners

        # What follows from recordings is kept by neither: the one's recordings would have it from edit to edit, and the
        # other's would make it in vain.
        class InMemory(MemoryActivations):
            spare_bytes = 0

        class InStore(StoreActivations):
            spare_bytes = 0

        loaded = load_model(model, name="bench", device=torch.device("cpu"), dtype=torch.float32)
        link = ActivationLinkSettings(upload_bytes=_UPLOAD_BYTES, silence_s=_SILENCE_S)
        settings = ActivationSettings(
            budget_bytes=_ACTIVATIONS_BYTES, model_name="bench", latent_scale=loaded.latent_scale, link=link
        )
        self._stores = InStore(settings, offers=StoreOffers(), counters=LinkCounters())
        self._edits = {
            LOAD_FREE: EngineEdits(loaded, InMemory(_ACTIVATIONS_BYTES)),
            RECORD: EngineEdits(loaded, self._stores),
        }
        # What turns of the one take, the plans of the other count with.
        self._edits[LOAD_FREE].times = self._edits[RECORD].times
        self._engines = {way: Engine(loaded, EngineLimits(), addons=(edits,)) for way, edits in self._edits.items()}
        self._engines[RECORD].warm_up()
        self._edits[RECORD].profile_blocks(self._engines[RECORD], SIZE, SIZE)
        self._planners = planners(self._stores, self._edits[RECORD].times)
        self._pixels = template()
        self._edits[RECORD].set_services([ServiceAddress(name="store", address=store)])
        _wait_until(lambda: self._stores.linked > 0)

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        """To one line."""
        ask = LoadingAsk(**question)
        if ask.way == RECORD:
            self._draw(LOAD_FREE, ask)
            drawn = self._draw(RECORD, ask)
            _wait_until(lambda: self._stores.counts["uploaded"] > 0)
        elif ask.way in (NO_CACHE, LOAD_FREE):
            drawn = self._draw(LOAD_FREE, ask)
        else:
            # What earlier edits have loaded is forgotten.
            self._stores.drop("")
            self._edits[RECORD].planner = self._planners[ask.way]
            drawn = self._draw(RECORD, ask)
        return asdict(drawn)

    def _draw(self, way: str, ask: LoadingAsk) -> Loaded:
        edits, engine = self._edits[way], self._engines[way]
        before = dict(edits.counts)
        seconds, record = _drawn(engine, self._order(ask))
        since = {name: count - before.get(name, 0) for name, count in edits.counts.items()}
        edited = record.edit
        return Loaded(
            steps_s=seconds - record.seconds["encode"] - record.seconds["decode"],
            reused=edited.blocks_reused / edited.blocks_total if edited and edited.blocks_total else 0.0,
            loaded=since["blocks_loaded"],
            recomputed=since["blocks_recomputed"],
            waited_s=since["load_wait_ms"] / 1000,
            load_bytes=since.get("load_bytes", 0),
            r2=edits.times.fit.r2 or 0.0,
        )

    def _order(self, ask: LoadingAsk) -> Any:
        import hashlib

        import numpy as np
        import torch

        from bottega.diffusion.engine.job import EngineOrder
        from bottega.diffusion.spec import EditSpec, ResolvedSpec
        from load.bench.edit_model import SIZE
        from load.bench.edit_steps import GUIDANCE_SCALE, PROMPT, STRENGTH

        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=ask.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            seed=ask.seed,
            strength=STRENGTH,
            edit=EditSpec(
                mask_digest=f"{ask.share}",
                image_digest=hashlib.sha256(self._pixels.tobytes()).hexdigest(),
                masked_blocks=ask.way != NO_CACHE,
                any_prompt=True,
            ),
        )
        mask = torch.from_numpy(square_mask(ask.share) // 255)
        return EngineOrder(key="edit", spec=spec, image=torch.from_numpy(np.array(self._pixels)), mask=mask)


def _drawn(engine: Any, order: Any) -> tuple[float, EngineRecord]:
    """Seconds of the whole edit, and what the engine says of it."""
    from bottega.diffusion.engine.events import JobFailed, JobFinished

    record = None
    began_s = perf_counter()
    engine.submit(order)
    while engine.busy:
        said = list(engine.turn())
        for event in said:
            match event:
                case JobFinished():
                    record = event.record
                case JobFailed():
                    raise event.error
        if not said:
            time.sleep(_LOOK_S)
    assert record is not None, "it has ended"
    return perf_counter() - began_s, record


def _wait_until(holds: Any) -> None:
    until_s = time.monotonic() + _LINK_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"it did not come within {_LINK_S:.0f} s")
        time.sleep(_LOOK_S)


def main() -> None:
    """Loads the model, says so with a line, then answers every line of stdin."""
    from bottega.diffusion.device.threads import compute_with

    parser = argparse.ArgumentParser(prog="python -m load.bench.edit_loading_engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--store", required=True)
    options = parser.parse_args()
    compute_with(options.threads)
    serve(EditLoading(options.model, options.store).answer)


if __name__ == "__main__":
    main()

"""The engine's add-on for edits: recordings in the worker's memory and in the fleet's activation stores."""

from __future__ import annotations

from collections import Counter

from bottega import kinds
from bottega.addons.edits.config import EditsConfig
from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.worker.store_activations import ActivationSettings, StoreActivations
from bottega.addons.edits.worker.store_link import ActivationLinkSettings
from bottega.engine.addon import EngineAddOnContext
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED

# The API's bound on reported templates.
_MAX_HOSTED = 256


def create(context: EngineAddOnContext) -> WorkerEdits:
    """Return the add-on for an engine. The manifest names this function."""
    return WorkerEdits(context)


class WorkerEdits(EngineEdits):
    """The add-on for edits."""

    def __init__(self, context: EngineAddOnContext) -> None:
        config, model = context.section(EditsConfig), context.model
        link = ActivationLinkSettings(silence_s=config.silence_s, upload_bytes=config.upload_mib << 20)
        settings = ActivationSettings(
            budget_bytes=config.activations_mib << 20,
            model_name=model.name,
            latent_scale=model.latent_scale,
            pinned=model.device.type == "cuda",
            link=link,
        )
        self._stores = StoreActivations(settings, offers=context.offers, counters=context.counters)
        super().__init__(
            model,
            self._stores,
            margin=config.mask_margin,
            fixed_rows=context.fixed_rows > 0,
            sparse=config.sparse_convolutions,
            template_budget_bytes=config.template_mib << 20,
            heartbeat=context.heartbeat,
        )

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the most recently used templates, of which a part is in memory, to the engine's periodic report."""
        super().fill_beat(beat)
        sizes: Counter[str] = Counter()
        for recording in self._stores.recordings:
            if recording.complete and recording.origin:
                sizes[recording.origin] += recording.held_bytes
        here = [(source, size_bytes) for source, size_bytes in sizes.items() if size_bytes]
        for source, size_bytes in here[:_MAX_HOSTED]:
            beat.hosted.add(kind=kinds.ACTIVATIONS, digest=source, size_bytes=size_bytes, state=HOSTED_STATE_LOADED)
        beat.links.open += self._stores.linked

"""The bench model in this process, one template that was recorded before, and edits of it as an engine takes them."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
import torch

from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.recordings.memory import MemoryActivations
from bottega.diffusion.engine.addon import EngineAddOn
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.engine.limits import EngineLimits
from bottega.diffusion.model.model import load_model
from bottega.diffusion.spec import EditSpec, ResolvedSpec
from load.bench.accelerations import accelerate
from load.bench.edit_model import SIZE, placed_mask
from load.bench.edit_steps import GUIDANCE_SCALE, PROMPT, STRENGTH, template

_RECORDINGS_BYTES = 4 << 30
# Of the least mask, at two places: the second completes what the first did not record.
_RECORDED_SHARES = (0.0, 0.0)


class EditDesk:
    """Makes engines over one loaded model and one memory of recordings, and orders for them.

    steps: that edits may have; a template is recorded for each of them, as their timesteps differ.
    """

    def __init__(self, model: Path, *, steps: Sequence[int], threads: int) -> None:
        torch.set_num_threads(threads)
        self._steps = steps
        self._model = load_model(model, name="bench", device=torch.device("cpu"), dtype=torch.float32)
        self._accelerated = False
        self._recordings = MemoryActivations(_RECORDINGS_BYTES)
        self._pixels = torch.from_numpy(np.array(template()))
        self._digest = hashlib.sha256(template().tobytes()).hexdigest()

    def engine(self, limits: EngineLimits, addons: Sequence[EngineAddOn] = ()) -> Engine:
        """One that has measured what its turns take."""
        engine = Engine(self._model, limits, addons=(EngineEdits(self._model, self._recordings), *addons))
        if not self._accelerated:
            accelerate(engine)
            self._accelerated = True
        engine.warm_up()
        return engine

    def record(self, engine: Engine) -> None:
        """The template, all of it."""
        for steps, (number, share) in itertools.product(self._steps, enumerate(_RECORDED_SHARES)):
            engine.submit(self.order(f"record {number}", share, random.Random(number), steps))
            while engine.busy:
                list(engine.turn())

    def order(self, key: Hashable, share: float, chance: random.Random, steps: int) -> EngineOrder:
        """An edit whose mask has this share of the tokens, anywhere. steps: one of those that are recorded."""
        mask = placed_mask(share, chance)
        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            seed=chance.randrange(1 << 31),
            strength=STRENGTH,
            edit=EditSpec(
                mask_digest=hashlib.sha256(mask.tobytes()).hexdigest(),
                image_digest=self._digest,
                masked_blocks=True,
                any_prompt=True,
            ),
        )
        return EngineOrder(key=key, spec=spec, image=self._pixels, mask=torch.from_numpy(mask // 255))

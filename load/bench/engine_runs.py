"""Engines in a bench's own process: what they try first, orders of edits, and runs to the end."""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from bottega.engine.acceleration.self_check import candidates
from bottega.engine.engine import Engine
from bottega.engine.events import EngineRecord, JobFailed, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.spec import EditSpec, ResolvedSpec
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from load.bench.framework import GUIDANCE_SCALE, PROMPT
from load.bench.stock import STRENGTH

ACCELERATIONS = ("channels_last.unet", "channels_last.vae")
"""What engines try in benches of edits and of a day: on a CPU an engine tries nothing that is not named."""

_DEADLINE_S = 120.0
_WHITE = 128
# Until an engine that waits for somebody's answer is looked at again.
_LOOK_S = 0.001


def load_bench_model(folder: Path | str) -> Model:
    """Return a model in float32 on the CPU."""
    return load_model(Path(folder), name="bench", device=torch.device("cpu"), dtype=torch.float32)


def accelerate(engine: Engine) -> None:
    """Let an engine try `ACCELERATIONS` before `warm_up`; once for a model, whose layout this changes."""
    engine.check_accelerations(candidates(ACCELERATIONS, engine.model), deadline_s=_DEADLINE_S)
    for each in engine.accelerations:
        kept = "kept" if each.kept else "not kept"  # not to stdout, by which sides answer
        print(f"{each.name}: {each.speedup:.2f} times as fast, {kept}", file=sys.stderr, flush=True)


def edit_order(
    key: Hashable,
    image: PIL.Image.Image,
    mask: npt.NDArray[np.uint8],
    *,
    steps: int,
    seed: int,
    masked: bool = True,
    any_prompt: bool = True,
    prompt: str = PROMPT,
    guidance_scale: float = GUIDANCE_SCALE,
    sampler: SamplerKind = SamplerKind.EULER,
) -> EngineOrder:
    """Return an edit as an engine takes it.

    Args:
        mask: Of the image's size, white where it is edited.
        masked: Whether only masked tokens may be computed; otherwise the edit is exact.
        any_prompt: Whether recordings of other prompts serve it.
    """
    pixels, digest = _pixels(image.tobytes(), image.size)
    spec = ResolvedSpec(
        prompt=prompt,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        width=image.width,
        height=image.height,
        seed=seed,
        sampler=sampler,
        strength=STRENGTH,
        edit=EditSpec(
            mask_digest=hashlib.sha256(mask.tobytes()).hexdigest(),
            image_digest=digest,
            masked_blocks=masked,
            any_prompt=masked and any_prompt,
        ),
    )
    return EngineOrder(key=key, spec=spec, image=pixels, mask=torch.from_numpy((mask >= _WHITE).astype(np.uint8)))


def run_orders(engine: Engine, orders: Sequence[EngineOrder]) -> Mapping[Hashable, EngineRecord]:
    """Run orders together to their end; return what the engine records of each. Raises the error of one that fails."""
    records: dict[Hashable, EngineRecord] = {}
    for order in orders:
        engine.submit(order)
    while engine.busy:
        events = list(engine.turn())
        for event in events:
            match event:
                case JobFinished():
                    records[event.key] = event.record
                case JobFailed():
                    raise event.error
        if not events:
            time.sleep(_LOOK_S)
    return records


def reused_share(records: Sequence[EngineRecord]) -> float:
    """Return the share of the edits' transformer blocks that were computed for masked tokens alone."""
    edits = [record.provenance for record in records]
    total = sum(edit.blocks_total for edit in edits)
    return sum(edit.blocks_reused for edit in edits) / total if total else 0.0


@functools.lru_cache(maxsize=32)
def _pixels(data: bytes, size: tuple[int, int]) -> tuple[torch.Tensor, str]:
    image = PIL.Image.frombytes("RGB", size, data)
    return torch.from_numpy(np.array(image)), hashlib.sha256(data).hexdigest()

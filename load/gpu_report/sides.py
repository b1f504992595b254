"""Who draws: stock Diffusers, eager or compiled, and an engine as a worker starts it; on one device, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import Event, JobFailed
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.model.dtype import DTYPES
from bottega.diffusion.spec import ResolvedSpec
from bottega.worker.config import EngineConfig
from bottega.worker.engine.runtime import LinkRequests, Runtime, load_runtime
from load.gpu_report.rig import GUIDANCE_SCALE, PROMPT, THREADS, Rig
from load.gpu_report.timing import give_back


class DrawingSide(Protocol):
    """Draws pictures, so many at once; returns when their pixels are on the host. number: of the round, as a seed."""

    def __call__(self, batch: int, number: int) -> None: ...


@contextmanager
def diffusers_side(rig: Rig, *, compiled: bool = False) -> Iterator[DrawingSide]:
    """The stock pipeline. compiled: its network by torch.compile and channels last, as Diffusers' guide has it."""
    give_back(rig.device)
    pipeline = stock_pipeline(rig)
    if compiled:
        pipeline.unet.to(memory_format=torch.channels_last)
        # On a CPU the compiler would take longer than all else; that all of it can be traced is seen without.
        backend = "inductor" if rig.on_gpu else "eager"
        pipeline.unet = torch.compile(pipeline.unet, fullgraph=True, dynamic=False, backend=backend)

    def draw(batch: int, number: int) -> None:
        pipeline(
            [PROMPT] * batch,
            num_inference_steps=rig.size.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=rig.size.side,
            height=rig.size.side,
            generator=[torch.Generator("cpu").manual_seed(number * batch + place) for place in range(batch)],
        )

    yield draw
    if compiled:
        torch.compiler.reset()


@contextmanager
def our_side(rig: Rig, **config: Any) -> Iterator[DrawingSide]:
    """A worker's engine. config: further settings of it."""
    with our_runtime(rig, **config) as runtime:
        yield drawing(rig, runtime)


def drawing(rig: Rig, runtime: Runtime) -> DrawingSide:
    """Requests of one picture each, all at once."""

    def draw(batch: int, number: int) -> None:
        for place in range(batch):
            runtime.engine.submit(EngineOrder(key=place, spec=spec_of(rig, seed=number * batch + place)))
        finish_all(runtime.engine)

    return draw


@contextmanager
def our_runtime(rig: Rig, **config: Any) -> Iterator[Runtime]:
    """What a worker's engine process has, warm; without services around it."""
    give_back(rig.device)
    runtime = load_runtime(
        EngineConfig(**{**engine_config(rig), **config}),
        LinkRequests(lambda request: None),  # no service is there whose links it would ask for
    )
    try:
        yield runtime
    finally:
        for addon in runtime.engine.addons:
            addon.stop()


def engine_config(rig: Rig) -> dict[str, Any]:
    """How a worker on the device is configured."""
    return {"model": str(rig.model), "device": rig.device, "dtype": rig.size.dtype, "threads": THREADS}


def spec_of(rig: Rig, *, seed: int, **said: Any) -> ResolvedSpec:
    """One picture. said: what else is told of it."""
    plain: dict[str, Any] = {
        "prompt": PROMPT,
        "num_inference_steps": rig.size.steps,
        "guidance_scale": GUIDANCE_SCALE,
        "width": rig.size.side,
        "height": rig.size.side,
        "seed": seed,
    }
    return ResolvedSpec(**(plain | said))


def finish_all(engine: Engine) -> list[Event]:
    """Turns it until it has nothing to do; all that it said. Raises the error of a job that failed."""
    said: list[Event] = []
    while engine.busy:
        for event in engine.turn():
            if isinstance(event, JobFailed):
                raise event.error
            said.append(event)
    return said


def stock_pipeline(rig: Rig, kind: Any = None, **parts: Any) -> Any:
    """As Diffusers ships it, on the device, without progress bars. kind: its class; text to image without."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pipeline = (kind or diffusers.StableDiffusionXLPipeline).from_pretrained(
        rig.model, use_safetensors=True, dtype=DTYPES[rig.size.dtype], add_watermarker=False, **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(rig.device)

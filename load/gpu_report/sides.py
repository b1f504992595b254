"""The sides that draw: stock Diffusers, eager or compiled, and an engine as a worker starts it, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bottega.engine.engine import Engine
from bottega.engine.events import EngineRecord, JobFailed, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.weights import DTYPES
from bottega.worker.config import EngineConfig
from bottega.worker.engine.runtime import LinkRequests, Runtime, load_runtime
from load.bench import stock
from load.bench.framework import GUIDANCE_SCALE, PROMPT
from load.gpu_report.rig import THREADS, Rig
from load.gpu_report.timing import give_back


class DrawingSide(Protocol):
    """Draws pictures at once; returns when their pixels are on the host.

    Args:
        batch: Pictures.
        number: Of the round, as a seed.
    """

    def __call__(self, batch: int, number: int) -> None: ...


@contextmanager
def diffusers_side(rig: Rig, *, compiled: bool = False) -> Iterator[DrawingSide]:
    """Give the stock pipeline.

    Args:
        compiled: Its network by torch.compile, with channels last, as Diffusers' guide has it.
    """
    give_back(rig.device)
    pipeline = stock_pipeline(rig)
    if compiled:
        pipeline.unet.to(memory_format=torch.channels_last)
        # On a CPU the compiler would take longer than all else; that all of it can be traced shows without.
        backend = "inductor" if rig.on_gpu else "eager"
        pipeline.unet = torch.compile(pipeline.unet, fullgraph=True, dynamic=False, backend=backend)

    def draw(batch: int, number: int) -> None:
        seeds = [number * batch + place for place in range(batch)]
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        pipeline([PROMPT] * batch, **rig.picture, guidance_scale=GUIDANCE_SCALE, generator=generators)

    yield draw
    if compiled:
        torch.compiler.reset()


@contextmanager
def our_side(rig: Rig, **config: Any) -> Iterator[DrawingSide]:
    """Give a worker's engine, with further settings."""
    with our_runtime(rig, **config) as runtime:
        yield drawing(rig, runtime)


def drawing(rig: Rig, runtime: Runtime) -> DrawingSide:
    """Return a side of an engine: requests of one picture each, all at once."""

    def draw(batch: int, number: int) -> None:
        for place in range(batch):
            runtime.engine.submit(EngineOrder(key=place, spec=spec_of(rig, seed=number * batch + place)))
        _finish_all(runtime.engine)

    return draw


@contextmanager
def our_runtime(rig: Rig, **config: Any) -> Iterator[Runtime]:
    """Give what a worker's engine process has, warm, without services around it."""
    give_back(rig.device)
    runtime = load_runtime(
        EngineConfig(**{**engine_config(rig), **config}),
        LinkRequests(lambda request: None),  # no service is there whose links it would ask for
    )
    try:
        yield runtime
    finally:
        for addon in runtime.engine.addons:
            addon.set_services(())


def engine_config(rig: Rig) -> dict[str, Any]:
    """Return the settings of a worker on the device."""
    return {"model": str(rig.model), "device": rig.device, "dtype": rig.size.dtype, "threads": THREADS}


def spec_of(rig: Rig, *, seed: int, **others: Any) -> ResolvedSpec:
    """Return the request of a picture, with other fields than the size's."""
    return ResolvedSpec(**{"prompt": PROMPT, **rig.picture, "guidance_scale": GUIDANCE_SCALE, "seed": seed, **others})


def draw_one(engine: Engine, order: EngineOrder) -> EngineRecord:
    """Draw one request and return its record. Raises the error of a job that failed."""
    engine.submit(order)
    (record,) = _finish_all(engine)
    return record


def _finish_all(engine: Engine) -> list[EngineRecord]:
    records: list[EngineRecord] = []
    while engine.busy:
        for event in engine.turn():
            if isinstance(event, JobFailed):
                raise event.error
            if isinstance(event, JobFinished):
                records.append(event.record)
    return records


def stock_pipeline(rig: Rig, kind: Any = None, **parts: Any) -> Any:
    """Return a pipeline of Diffusers on the device; see `load.bench.stock`."""
    return stock.stock_pipeline(rig.model, kind, dtype=DTYPES[rig.size.dtype], **parts).to(rig.device)

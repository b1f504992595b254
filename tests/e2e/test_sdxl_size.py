"""SDXL at its own size, with random weights in bfloat16 from files as people publish them: `bottega up` to a picture.

A picture at 256x256 with a ControlNet, and one with a LoRA of the UNet and both text encoders too, equal stock's within
1 level. Loading takes little memory beside the weights. Takes 10 GB of disk, 16 GB of memory and some ten
minutes; what it measures goes to `load/results`.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import psutil
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from numpy.typing import NDArray

from bottega.client import Client, ControlNet
from load.bench.framework import record
from tests.samples.controlnets import control_image
from tests.samples.published import write_controlnet, write_lora, write_model
from tests.support.running_up import Up, running_up
from tests.support.stock import Pixels, load_stock, pixels_of, variant
from tests.support.warm_start.sitecustomize import COLD

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3600)]

GIB = 1 << 30
START_S = 900.0
THREADS = 2
# A look at a worker's memory takes its kernel some tens of milliseconds.
LOOK_S = 0.25
PROMPT = "a big red star on the left on a blue background"
LORA_SCALE, CONTROL_SCALE = 0.8, 0.7
DRAW: Mapping[str, Any] = {"num_inference_steps": 3, "guidance_scale": 5.0, "width": 256, "height": 256}
SEED = 7

Made = TypeVar("Made")


@dataclass(slots=True, kw_only=True)
class WorkerMemory:
    """The memory of a worker's processes, looked at while it starts."""

    peak_pss_bytes: int = 0
    """Of all its processes together, at one look; a page that several have counts once."""
    engine_peak_bytes: int = 0
    """The most that was resident in the engine's process. Its kernel keeps count, and its warm-up begins anew."""
    _looked_s: float = field(default=0.0, init=False)

    def look(self, up: Up) -> None:
        """Look if it is time to."""
        if time.monotonic() - self._looked_s < LOOK_S or (record := up.state.read()) is None:
            return
        workers = [child.pid for child in record.children if child.name.startswith("worker")]
        processes = [process for pid in workers for process in _family(pid)]
        self.peak_pss_bytes = max(self.peak_pss_bytes, sum(_number(each, "smaps_rollup", "Pss") for each in processes))
        peaks = [_number(each, "status", "VmHWM") for each in processes if _is_engine(each)]
        self.engine_peak_bytes = max([self.engine_peak_bytes, *peaks])
        self._looked_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a suite of this size drew and took."""

    controlled: Pixels
    """With the ControlNet."""
    both: Pixels
    """With the LoRA, too."""
    exact: bool
    """Whether both pictures say that they are exact."""
    draw_s: float
    """Seconds of the first picture with both, for which the LoRA is loaded."""
    ready_s: float
    stages_s: Mapping[str, float]
    """Seconds of the stages of the engine's start."""
    weights_bytes: int
    engine_peak_bytes: int
    """The most that was resident in the engine's process before the first picture."""
    worker_peak_pss_bytes: int

    @property
    def bound_bytes(self) -> float:
        """Return what loading may take."""
        return 1.15 * self.weights_bytes + 2 * GIB


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The model with its ControlNet and its LoRA; gone with the tests, where pytest keeps its own folders."""
    with tempfile.TemporaryDirectory(prefix="bottega-sdxl-size-") as made:
        _in_process(_write, Path(made) / "sdxl")
        yield Path(made)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    memory, model = WorkerMemory(), folder / "sdxl"
    options = ("--model", model, "--device", "cpu", "--dtype", "bfloat16", "--threads", THREADS)
    began_s = time.monotonic()
    with running_up(folder / "up", *options, environment=COLD, start_s=START_S, watch=memory.look) as up:
        ready_s, record = time.monotonic() - began_s, up.record()
        memory.look(up)
        peaks = memory.engine_peak_bytes, memory.peak_pss_bytes
        with Client(record.address, fleet_address=record.fleet_address, timeout_s=1800.0) as client:
            control = ControlNet("canny", _control(), controlnet_conditioning_scale=CONTROL_SCALE)
            controlled = client.generate(PROMPT, seed=SEED, controlnets=[control], **DRAW)
            began_s = time.monotonic()
            both = client.generate(PROMPT, seed=SEED, controlnets=[control], lora=[("trained", LORA_SCALE)], **DRAW)
            draw_s = time.monotonic() - began_s
        stages = next(event["stages_s"] for event in _events(up.state.logs) if event.get("event") == "engine ready")
    return Run(
        controlled=pixels_of(controlled.pil()),
        both=pixels_of(both.pil()),
        exact=controlled.provenance.exact and both.provenance.exact,
        draw_s=draw_s,
        ready_s=ready_s,
        stages_s=stages,
        weights_bytes=_weights_bytes(model),
        engine_peak_bytes=peaks[0],
        worker_peak_pss_bytes=peaks[1],
    )


@pytest.fixture(scope="module")
def stock(folder: Path, run: Run) -> Mapping[str, Pixels]:
    """What stock draws after the suite has ended: with both, the LoRA beside the weights or in them, and with one."""
    return _in_process(_draw_stock, folder / "sdxl")


def test_pictures_equal_stock_within_one_level(run: Run, stock: Mapping[str, Pixels]) -> None:
    _record(run, stock)
    assert run.exact
    assert _levels_off(run.controlled, stock["controlnet"]).max() <= 1
    assert _levels_off(run.both, stock["both"]).max() <= 1


def test_the_controlnet_and_the_lora_matter(stock: Mapping[str, Pixels]) -> None:
    for name in ("lora", "controlnet"):
        assert _levels_off(stock[name], stock["both"]).mean() > 2


def test_loading_takes_little_memory_beside_the_weights(run: Run) -> None:
    assert run.engine_peak_bytes <= run.bound_bytes
    assert run.worker_peak_pss_bytes <= run.bound_bytes


def _write(folder: Path) -> None:
    write_model(folder, changes={}, dtype=torch.bfloat16)
    write_controlnet(folder / "controlnets" / "canny", changes={}, dtype=torch.bfloat16)
    write_lora(folder / "loras" / "trained.safetensors", "kohya", model=folder, rank=8, strength=0.5)


def _draw_stock(folder: Path) -> Mapping[str, Pixels]:
    torch.set_num_threads(THREADS)
    stock = load_stock(folder, torch.bfloat16)
    net = ControlNetModel.from_pretrained(
        folder / "controlnets" / "canny", torch_dtype=torch.bfloat16, use_safetensors=True
    )
    controlled = variant(stock, StableDiffusionXLControlNetPipeline, controlnet=net)
    control = {"image": _control(), "controlnet_conditioning_scale": CONTROL_SCALE}
    # Before the LoRA is loaded: PEFT changes how the other layers round, also while the LoRA is disabled.
    drawn = {"controlnet": _drawn(controlled, **control)}
    stock.load_lora_weights(str(folder / "loras" / "trained.safetensors"), adapter_name="trained")
    stock.set_adapters(["trained"], [LORA_SCALE])
    drawn |= {"both": _drawn(controlled, **control), "lora": _drawn(variant(stock))}
    stock.fuse_lora()  # last: in half precision, unfusing does not restore the weights
    return drawn | {"fused": _drawn(controlled, **control)}


def _drawn(pipeline: Any, **options: Any) -> Pixels:
    return pixels_of(pipeline(PROMPT, generator=torch.Generator("cpu").manual_seed(SEED), **DRAW, **options).images[0])


def _levels_off(pixels: Pixels, others: Pixels) -> NDArray[np.int64]:
    off: NDArray[np.int64] = np.abs(pixels.astype(np.int64) - others)
    return off


def _control() -> PIL.Image.Image:
    return PIL.Image.fromarray(control_image(1, 256, 256).numpy())


def _in_process(function: Callable[[Path], Made], folder: Path) -> Made:
    """Call it in a process of its own, whose memory goes with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, folder).result()


def _record(run: Run, stock: Mapping[str, Pixels]) -> None:
    """Write what was measured as a result of this machine."""
    off = {
        "controlnet": _levels_off(run.controlled, stock["controlnet"]),
        "controlnet_and_lora": _levels_off(run.both, stock["both"]),
        "stock_with_the_lora_fused": _levels_off(stock["fused"], stock["both"]),
    }
    rows = [
        ("memory of the engine while it loads", _gib(run.engine_peak_bytes), f"at most {_gib(run.bound_bytes)}"),
        ("memory of the worker", _gib(run.worker_peak_pss_bytes), f"at most {_gib(run.bound_bytes)}"),
        ("weights", _gib(run.weights_bytes), ""),
        ("ready after", f"{run.ready_s:.0f} s", ""),
        *((f"of it {name}", f"{seconds:.1f} s", "") for name, seconds in run.stages_s.items()),
        ("first picture with both", f"{run.draw_s:.0f} s", ""),
        *((f"levels off stock, at most: {name}", f"{levels.max()}", "") for name, levels in off.items()),
        *((f"levels off stock, mean: {name}", f"{levels.mean():.2f}", "") for name, levels in off.items()),
    ]
    values = {
        "engine_peak_gib": run.engine_peak_bytes / GIB,
        "worker_peak_pss_gib": run.worker_peak_pss_bytes / GIB,
        "ready_s": run.ready_s,
        "draw_s": run.draw_s,
    }
    conditions = f"{THREADS} threads, {DRAW['num_inference_steps']} steps of 256x256"
    record("sdxl-size", rows, values, conditions=conditions)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _weights_bytes(folder: Path) -> int:
    """Return the size of the model's own weights, without ControlNets and LoRAs."""
    return sum(file.stat().st_size for file in folder.glob("*/*.safetensors") if file.parent.name != "loras")


def _events(logs: Path) -> Iterator[dict[str, Any]]:
    for log in logs.glob("worker*.log"):
        yield from (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{"))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "bottega.worker.engine.main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _number(process: psutil.Process, file: str, name: str) -> int:
    """Return a number of bytes from a file of /proc; 0 where the process has ended."""
    try:
        text = Path(f"/proc/{process.pid}/{file}").read_text(encoding="utf-8")
    except OSError:
        return 0
    _, found, rest = text.partition(f"\n{name}:")
    return 1024 * int(rest.split()[0]) if found else 0

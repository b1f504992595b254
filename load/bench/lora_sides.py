"""The two sides of the LoRA benches, each in a process of its own: stock Diffusers, and the suite's engine.

`python -m load.bench.lora_sides SIDE --model FOLDER --threads N` answers one JSON line for each that it is given:
{"swap": LORA} (a LoRA goes in and out again) or {"draw": {...}} (pictures).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from load.bench.lora_files import LoraFiles
from load.bench.side_process import SideProcess, serve, stock_pipeline
from tests.support.engines import make_engine

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
MIB = 1 << 20

Answers = Mapping[str, Callable[[Any], dict[str, float]]]


class Side(SideProcess):
    """One side's process, driven from here. side: diffusers or suite. Stop it (`with` does)."""

    def __init__(self, side: str, model: Path, threads: int) -> None:
        super().__init__("load.bench.lora_sides", side, "--model", model, "--threads", threads)

    def swap(self, lora: LoraFiles) -> Mapping[str, float]:
        """Puts a LoRA in and takes it out again: seconds, and peak_mib of memory beyond that of the loaded model."""
        return self.ask({"swap": {"theirs": str(lora.theirs), "ours": str(lora.ours), "digest": lora.digest}})

    def draw(self, loras: Sequence[LoraFiles | None], *, steps: int, size: int) -> float:
        """Seconds for one picture with each of these LoRAs, or none. size: pixels a side."""
        said = [each and {"theirs": str(each.theirs), "ours": str(each.ours), "digest": each.digest} for each in loras]
        return self.ask({"draw": {"loras": said, "steps": steps, "size": size}})["seconds"]


def diffusers_side(model: Path) -> Answers:
    """Load, fuse, unfuse, unload; and pictures one by one, each with its LoRA swapped in."""
    import torch
    from diffusers.utils import logging

    logging.set_verbosity_error()
    pipeline = stock_pipeline(model)
    loaded_kib = _memory_kib("VmRSS")

    def swap(said: Any) -> dict[str, float]:
        def work() -> None:
            pipeline.load_lora_weights(said["theirs"], use_safetensors=True)
            pipeline.fuse_lora()
            pipeline.unfuse_lora()
            pipeline.unload_lora_weights()

        return _measured(work, loaded_kib)

    def draw(said: Any) -> dict[str, float]:
        began_s = perf_counter()
        for seed, lora in enumerate(said["loras"]):
            if lora is not None:
                pipeline.load_lora_weights(lora["theirs"], use_safetensors=True)
            pipeline(
                PROMPT,
                num_inference_steps=said["steps"],
                guidance_scale=GUIDANCE_SCALE,
                width=said["size"],
                height=said["size"],
                generator=torch.Generator("cpu").manual_seed(seed),
            )
            if lora is not None:
                pipeline.unload_lora_weights()
        return {"seconds": perf_counter() - began_s}

    return {"swap": swap, "draw": draw}


def suite_side(model: Path) -> Answers:
    """Fetch, patch, restore; and pictures all at once, by an engine that gets its LoRAs from files."""
    import torch

    from bottega.addons.loras.engine import LoraAtScale, LoraRef, LoraWeights
    from bottega.diffusion.engine.events import JobFailed
    from bottega.diffusion.engine.job import EngineOrder
    from bottega.diffusion.engine.limits import EngineLimits
    from bottega.diffusion.model.model import load_model
    from bottega.diffusion.spec import LoraSpec, ResolvedSpec
    from load.bench.local_loras import LocalLoras

    loaded = load_model(model, name="bench", device=torch.device("cpu"), dtype=torch.float32)
    loaded_kib = _memory_kib("VmRSS")
    files: dict[str, Path] = {}
    source = LocalLoras(files)
    weights = LoraWeights(loaded)
    engine = make_engine(loaded, EngineLimits(), loras=source)
    engine.warm_up()

    def swap(said: Any) -> dict[str, float]:
        files[said["digest"]] = Path(said["ours"])

        def work() -> None:
            handle = source.begin(LoraRef(name="bench", digest=said["digest"]))
            while not handle.ready:
                source.settle([handle], 1.0)
            layers = {name: handle.layers(name) for name in ("text_encoder", "text_encoder_2", "unet")}
            uses = [LoraAtScale(digest=said["digest"], scale=1.0, layers=layers)]
            weights.put_in_text(weights.text_set(uses))
            weights.put_in_unet(weights.unet_set(uses))
            source.close([handle])
            weights.put_in_text(None)
            weights.put_in_unet(None)

        return _measured(work, loaded_kib)

    def draw(said: Any) -> dict[str, float]:
        began_s = perf_counter()
        for seed, lora in enumerate(said["loras"]):
            if lora is not None:
                files[lora["digest"]] = Path(lora["ours"])
            spec = ResolvedSpec(
                prompt=PROMPT,
                num_inference_steps=said["steps"],
                guidance_scale=GUIDANCE_SCALE,
                width=said["size"],
                height=said["size"],
                seed=seed,
                loras=() if lora is None else (LoraSpec(name="bench", digest=lora["digest"]),),
            )
            engine.submit(EngineOrder(key=seed, spec=spec))
        while engine.busy:
            for event in engine.turn():
                if isinstance(event, JobFailed):
                    raise event.error
        return {"seconds": perf_counter() - began_s}

    return {"swap": swap, "draw": draw}


def _measured(work: Callable[[], None], loaded_kib: int) -> dict[str, float]:
    """Seconds of it, and how far the process's memory was above that at its highest, MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    began_s = perf_counter()
    work()
    seconds = perf_counter() - began_s
    return {"seconds": seconds, "peak_mib": (_memory_kib("VmHWM") - loaded_kib) / 1024}


def _memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Loads the side's model, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.lora_sides", description=__doc__)
    parser.add_argument("side", choices=["diffusers", "suite"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answers = diffusers_side(options.model) if options.side == "diffusers" else suite_side(options.model)

    def answer(question: Mapping[str, Any]) -> Mapping[str, float]:
        ((what, said),) = question.items()
        return answers[what](said)

    serve(answer)


if __name__ == "__main__":
    main()

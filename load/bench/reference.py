"""Stock Diffusers in a process of its own: what every bench compares with.

`python -m load.bench.reference --model FOLDER --threads N` answers one JSON line for each that it is given.
It knows no suite.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

# From nothing to a loaded pipeline, with the cores shared.
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One call of the pipeline: a picture for every prompt, all with the same steps."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    guidance_scale: float


class Reference:
    """The pipeline's process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, "-m", "load.bench.reference", "--model", str(model), "--threads", str(threads)]
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def draw(self, batch: Batch) -> float:
        """Draws; returns the seconds of the pipeline's call alone, as measured in its process."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asdict(batch)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate(timeout=START_TIMEOUT_S)

    def _answer(self) -> float:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reference ended with {self._process.wait(START_TIMEOUT_S)}")
        return float(json.loads(line)["seconds"])


def serve(model: Path, threads: int) -> None:
    """Loads the pipeline, says so with a line, then draws a batch for every line of stdin."""
    import torch
    import transformers
    from diffusers import StableDiffusionXLPipeline
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    pipeline = StableDiffusionXLPipeline.from_pretrained(
        model, use_safetensors=True, dtype=torch.float32, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    print(json.dumps({"seconds": 0.0}), flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in batch["seeds"]]
        began = time.perf_counter()
        pipeline(
            list(batch["prompts"]),
            num_inference_steps=batch["steps"],
            guidance_scale=batch["guidance_scale"],
            generator=generators,
        )
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def main() -> None:
    """Serves the arguments' model until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(arguments.model, arguments.threads)


if __name__ == "__main__":
    main()

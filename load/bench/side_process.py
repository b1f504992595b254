"""One side of a comparison in a process of its own: it answers one JSON line for each that it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bottega.process import engine_environment

# To end, with the cores shared.
_END_TIMEOUT_S = 120.0


class SideProcess:
    """`python -m module`, driven from here; it has answered once when it is ready. Stop it (`with` does).

    exclusive_cores: of a side that computes while no other one does.
    """

    def __init__(self, module: str, *arguments: object, exclusive_cores: bool = False) -> None:
        self._module = module
        command = [sys.executable, "-m", module, *map(str, arguments)]
        env = {**os.environ, **engine_environment(exclusive_cores=exclusive_cores)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        try:
            self._answer()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def ask(self, question: object) -> Mapping[str, float]:
        """What it answers. RuntimeError when it has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate(timeout=_END_TIMEOUT_S)

    def _answer(self) -> Mapping[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self._process.wait(_END_TIMEOUT_S)}")
        answer: Mapping[str, float] = json.loads(line)
        return answer


def serve(answer: Callable[[Any], Mapping[str, float]]) -> None:
    """The process's own end: says that it is ready, then answers every line of stdin."""
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def stock_pipeline(model: Path, kind: Any = None, **parts: Any) -> Any:
    """A pipeline as Diffusers ships it, in float32, without progress bars. kind: its class; text to image without."""
    import torch
    import transformers
    from diffusers import StableDiffusionXLPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    pipeline = (kind or StableDiffusionXLPipeline).from_pretrained(
        model, use_safetensors=True, dtype=torch.float32, add_watermarker=False, **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

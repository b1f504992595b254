"""The engine process: `python -m bottega.worker.engine.main --fd N --config-json JSON`, started by the worker's front.

It reads what it is told and decides what is imported; `loop` then runs the engine.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bottega.diffusion.lean_imports import lean_imports
from bottega.process import FramedPipe
from bottega.process.memory import keep_freed_memory, trim_at_rest
from bottega.rpc.operation import logs
from bottega.worker.config import EngineConfig


def main() -> int:
    """Run the engine and return the exit status; see `loop.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m bottega.worker.engine.main", description="A worker's engine process"
    )
    parser.add_argument("--fd", type=int, required=True, help="the pipe to the front")
    parser.add_argument("--config-json", type=json.loads, required=True, help="EngineConfig as JSON")
    parser.add_argument("--trials", type=Path, help="where it notes which acceleration it is trying")
    arguments = parser.parse_args()
    logs.configure("engine", "info")
    keep_freed_memory()
    trim_at_rest()
    with lean_imports():
        from bottega.worker.engine.loop import run
    config = EngineConfig(**arguments.config_json)
    return run(FramedPipe.from_fd(arguments.fd), config, trials=arguments.trials)


if __name__ == "__main__":
    status = main()
    logs.flush()
    os._exit(status)  # a thread may be waiting in the pipe

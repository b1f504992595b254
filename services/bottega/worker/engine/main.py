"""The engine process: `python -m bottega.worker.engine.main --fd N --config-json JSON`, started by the front process.

It reads its arguments and restricts imports before `loop` imports torch and runs the engine.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bottega.config import parse
from bottega.device.engine_start import StartReporter, lean_imports
from bottega.errors import Unavailable
from bottega.process.child import FramedPipe
from bottega.process.memory import keep_freed_memory, trim_at_rest
from bottega.rpc.operation import logs
from bottega.v1.engine_pb2 import EngineEvent, EngineStarting
from bottega.v1.fleet_pb2 import StartProgress
from bottega.worker.config import EngineConfig


def main() -> int:
    """Run the engine and return the exit status; see `loop.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m bottega.worker.engine.main", description="A worker's engine process"
    )
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the pipe to the front process")
    parser.add_argument("--config-json", type=json.loads, required=True, help="EngineConfig as JSON")
    parser.add_argument("--trials", type=Path, help="file in which the engine writes which acceleration it is trying")
    parser.add_argument(
        "--max-quiet-s", type=float, default=0.0, help="longest pause in seconds between two messages of an idle engine"
    )
    arguments = parser.parse_args()
    logs.configure("engine", "info")
    keep_freed_memory()
    trim_at_rest()
    channel = FramedPipe.from_fd(arguments.fd)
    reporter = StartReporter(lambda *progress: channel.send(starting_of(*progress).SerializeToString()))
    try:
        reporter.begin("importing libraries")
        with lean_imports():
            from bottega.worker.engine.loop import run
        config = parse(EngineConfig, arguments.config_json, source="the configuration of the engine process")
        return run(channel, config, reporter, trials=arguments.trials, max_quiet_s=arguments.max_quiet_s)
    except Unavailable:
        return 0  # the front is gone


def starting_of(stage: str, done_bytes: int, total_bytes: int) -> EngineEvent:
    """Return the message that reports the progress of the start."""
    progress = StartProgress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes)
    return EngineEvent(starting=EngineStarting(progress=progress))


if __name__ == "__main__":
    status = main()
    logs.flush()
    os._exit(status)  # a thread may be waiting in the pipe

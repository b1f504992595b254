"""The engine process: `python -m bottega.controlnet.engine --fd N --config-json JSON`, started by the front process.

It reads its arguments and restricts imports; `engine_loop` does the work.
"""

from __future__ import annotations

import argparse
import json
import os

from bottega.config import parse
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.device.engine_start import lean_imports
from bottega.process.child import FramedPipe
from bottega.process.memory import keep_freed_memory, trim_at_rest
from bottega.rpc.operation import logs


def main() -> int:
    """Run the engine and return the exit status: 1, after a log line, if it cannot start."""
    parser = argparse.ArgumentParser(
        prog="python -m bottega.controlnet.engine", description="The engine process of a ControlNet server"
    )
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the pipe to the front process")
    parser.add_argument("--config-json", type=json.loads, required=True, help="ControlNetEngineConfig as JSON")
    parser.add_argument("--max-quiet-s", type=float, default=0.0, help="longest pause between two messages at rest")
    arguments = parser.parse_args()
    logs.configure("engine", "info")
    keep_freed_memory()
    trim_at_rest()
    with lean_imports():
        from bottega.controlnet.engine_loop import run
    config = parse(ControlNetEngineConfig, arguments.config_json, source="the configuration of the engine process")
    return run(FramedPipe.from_fd(arguments.fd), config, max_quiet_s=arguments.max_quiet_s)


if __name__ == "__main__":
    status = main()
    logs.flush()
    os._exit(status)  # threads may be waiting in the pipe and in links

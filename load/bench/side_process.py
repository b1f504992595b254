"""One side of a comparison in a process of its own: it answers one JSON line for each that it is given.

`python -m load.bench.side_process MODULE:FUNCTION ARGUMENTS` is that process. The function takes the arguments, a JSON
object, and returns the function that answers.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from bottega.process.engine_supervisor import engine_environment

Answer = Callable[..., Mapping[str, float]]
"""Answers a question, whose fields are its arguments."""

# To end, with the cores shared.
_END_TIMEOUT_S = 120.0


class Side:
    """A side's process, which is ready when this is made. Stop it, or use it in a `with` block.

    Args:
        make: A function of a module, which the process calls with the other arguments.
        threads: Of torch.
        exclusive_cores: The side computes while no other one does.
    """

    def __init__(
        self, make: Callable[..., Answer], *, threads: int, exclusive_cores: bool = False, **arguments: object
    ) -> None:
        self._name = f"{_module_of(make)}:{make.__qualname__}"
        told = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        command = [sys.executable, "-m", __name__, self._name, str(threads), json.dumps(told)]
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

    def ask(self, **question: object) -> Mapping[str, float]:
        """Return its answer. Raises RuntimeError when the process has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate(timeout=_END_TIMEOUT_S)

    def _answer(self) -> Mapping[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with {self._process.wait(_END_TIMEOUT_S)}")
        answer: Mapping[str, float] = json.loads(line)
        return answer


def _module_of(function: Callable[..., object]) -> str:
    """Return its module's name, also where the module is the program that runs."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "the program was started with -m"
    return spec.name


def main() -> None:
    """Make the side, say that it is ready, and answer every line of stdin."""
    from bottega.device.devices import compute_with

    name, threads, arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    compute_with(int(threads))
    answer = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

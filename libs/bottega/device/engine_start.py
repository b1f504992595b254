"""The start of an engine's process: the imports of its libraries, and reports of its progress.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator

UNUSED = ("peft", "scipy")


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Import torch, transformers and Diffusers in this context, before anything else in the process imports them.

    From here on PEFT and SciPy cannot be imported, even if they are installed: Diffusers imports them at once if it
    finds them, which takes a second for each. The engine applies LoRAs itself, and has no sampler that needs SciPy.
    Source: the language reference, "The module cache": a module whose entry is None cannot be found.

    Without a CUDA device, Triton cannot be imported either. torch's compiler, which Diffusers imports, would import it,
    and its library takes 65 MiB.

    The libraries' objects live as long as the process, so they are exempt from later garbage collections. A collection
    of all of them takes a quarter of a second, in the middle of a step. Source: gc.freeze's documentation.
    """
    for unused in UNUSED:
        sys.modules[unused] = None  # type: ignore[assignment]  # Missing in its type annotations.
    gc.disable()
    try:
        _hide_triton()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _hide_triton() -> None:
    """Keep Triton from being imported, unless there is a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # Missing in its type annotations.


# Seconds between two reports of a stage: often enough as a sign of life, and rare enough to cost nothing.
_INTERVAL_S = 0.5

SendProgress = Callable[[str, int, int], None]
"""Called with a stage, its processed bytes and its total bytes; both are 0 if the stage does not count bytes."""


class StartReporter:
    """Reports the stages of a start.

    Args:
        send: Called at the start of each stage, and now and then with its progress.
        clock: Returns monotonic seconds.
    """

    def __init__(self, send: SendProgress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._stage = ""
        self._done_bytes = 0
        self._total_bytes = 0
        self._sent_s = 0.0

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Report that a stage begins."""
        self._stage, self._done_bytes, self._total_bytes = stage, 0, total_bytes
        self._report()

    def advance(self, size_bytes: int = 0) -> None:
        """Report that another `size_bytes` of the stage are processed."""
        self._done_bytes += size_bytes
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def _report(self) -> None:
        self._sent_s = self._clock()
        self._send(self._stage, self._done_bytes, self._total_bytes)


def silent_reporter() -> StartReporter:
    """Return a reporter that sends nothing."""
    return StartReporter(lambda *_: None)

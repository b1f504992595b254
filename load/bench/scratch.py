"""The folder of a run of a bench, which goes when the run ends, however it ends."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(inside: Path | None = None) -> Iterator[Path]:
    """SIGTERM is as Ctrl-C from now on: what was started in the block is stopped. inside: a folder on another disk."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="bottega-bench-", dir=inside) as folder:
        yield Path(folder)

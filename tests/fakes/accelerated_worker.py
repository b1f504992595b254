"""A worker whose engine tries faked accelerations: `python -m tests.fakes.accelerated_worker --config FILE`."""

from __future__ import annotations

import functools
import sys

from bottega.worker import __main__ as worker
from bottega.worker.engine_client import WorkerEngineClient

if __name__ == "__main__":
    client = functools.partial(WorkerEngineClient, module="tests.fakes.accelerated_engine")
    worker.WorkerEngineClient = client  # type: ignore[assignment, attr-defined]
    sys.exit(worker.main())

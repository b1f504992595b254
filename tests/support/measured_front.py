"""A worker's front, with a scripted engine, that measures what every callback of its event loop costs.

`python -m tests.support.measured_front GATEWAY` joins the fleet at that address, prints its own address and that of its
metrics, serves until its stdin closes, then prints the costliest callbacks as JSON: CPU milliseconds and what ran.
Without GATEWAY it is a bare gRPC server that receives and forgets: what gRPC itself takes here and now.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import grpc

from bottega.codec.pool import CodecPool
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.process.memory import IMAGE_AT_WORK_BYTES, keep_freed_memory, tune_garbage_collector
from bottega.rpc.channel import channel_options
from bottega.worker.__main__ import build
from bottega.worker.config import WorkerConfig
from bottega.worker.engine_client import WorkerEngineClient

SHOWN = 10


class Ledger:
    """CPU time of callbacks, measured around asyncio's own way to run them."""

    def __init__(self) -> None:
        self.calls = 0
        self.costliest: list[tuple[float, str]] = []

    def measure(self) -> None:
        """From now on, of the loop that this is called in: metrics are served by another thread's."""
        run, thread = asyncio.Handle._run, threading.get_ident()

        def measured(handle: Any) -> None:
            if threading.get_ident() != thread:
                run(handle)
                return
            began_s = time.thread_time()
            run(handle)
            self.add((time.thread_time() - began_s) * 1000, handle)

        handles: Any = asyncio.Handle
        handles._run = measured

    def add(self, cost_ms: float, handle: Any) -> None:
        self.calls += 1
        if len(self.costliest) < SHOWN or cost_ms > self.costliest[-1][0]:
            self.costliest = sorted([*self.costliest, (cost_ms, what(handle._callback))], reverse=True)[:SHOWN]


def what(callback: Any) -> str:
    task = getattr(callback, "__self__", None)
    return repr(task.get_coro() if isinstance(task, asyncio.Task) else callback)[:200]


async def front(gateway: str) -> None:
    """Serve as a worker's front that joins `gateway`."""
    config = WorkerConfig(name="measured", gateway=gateway)
    timeouts = EngineTimeouts(start_stall_s=20, hang_s=10, stall_s=10)
    engine = WorkerEngineClient(config.engine, timeouts=timeouts, module="tests.fakes.scripted_engine")
    pool = CodecPool(max_waiting=9 * config.max_attempts)  # as a worker has it
    await engine.spawn()
    await pool.start()
    server, worker = build(config, engine, pool)
    await server.start()
    await worker.start()
    await _measure_until_told(f"{server.address} {server.metrics_address}")
    await server.stop()
    await worker.stop()


async def bare() -> None:
    """Serve every method with a handler that takes one message and answers nothing."""

    class Forgetting(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(forget)

    async def forget(request: bytes, context: object) -> bytes:
        return b""

    server = grpc.aio.server(handlers=(Forgetting(),), options=channel_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await _measure_until_told(f"127.0.0.1:{port} -")
    await server.stop(None)


async def _measure_until_told(said: str) -> None:
    ledger = Ledger()
    ledger.measure()
    print(said, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"calls": ledger.calls, "costliest": ledger.costliest}), flush=True)


if __name__ == "__main__":
    keep_freed_memory(at_once_bytes=IMAGE_AT_WORK_BYTES)
    tune_garbage_collector()
    asyncio.run(front(sys.argv[1]) if sys.argv[1:] else bare())

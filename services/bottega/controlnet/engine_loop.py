"""The main loop of a server's engine process, which owns the device, the ControlNets and workers' connections.

It exchanges controlnet_engine.proto messages over the pipe, and exits when the pipe closes. One thread computes, and
also sends heartbeats between two blocks of a network, so a hanging engine falls silent and a slow one does not. Work
that waits for disks and workers has its own threads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging

from bottega.controlnet.batch_executor import BatchExecutor
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.controlnet.model_registry import ModelRegistry
from bottega.controlnet.worker_link import ControlNetLinks
from bottega.device.devices import compute_with, pick_device, use_device
from bottega.device.memory_plan import DeviceMemoryMeter, open_memory_plan
from bottega.device_links.devices import device_links
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, ConfigError, Unavailable
from bottega.model.weights import AUTO, DTYPES
from bottega.process.child import FramedPipe
from bottega.rpc.link_service import answer_link_request
from bottega.rpc.operation.metrics import link_counts
from bottega.rpc.status import to_job_error
from bottega.v1 import controlnet_engine_pb2 as pb
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADING

_log = logging.getLogger(__name__)

_BEAT_S = 0.1
# Without a forward pass, a command or anything new to report for so long, and without sessions and loads, the engine is
# at rest. It then beats only every `max_quiet_s`.
_REST_AFTER_S = 10.0
# Share of the device's memory for weights, if less than `budget_bytes`. The rest is for forward passes and connections.
_WEIGHTS_SHARE = 0.75


def run(channel: FramedPipe, config: ControlNetEngineConfig, *, max_quiet_s: float = 0.0) -> int:
    """Serve until the front process closes the pipe, and return the exit status.

    If the engine cannot start, the reason is logged. The status is then 1, or that of ConfigError if another start
    would fail, too.

    Args:
        max_quiet_s: See ControlNetEngineLoop.
    """
    diffusers_logging.set_verbosity_error()
    compute_with(config.threads)
    try:
        ControlNetEngineLoop(channel, config, pick_device(config.device), max_quiet_s=max_quiet_s).run()
    except Unavailable:
        return 0  # the front is gone
    except (BottegaError, OSError, ValueError) as error:
        _log.error("the engine cannot start", extra={"why": str(error)})
        return ConfigError.exit_status if isinstance(error, ConfigError) else 1
    return 0


class ControlNetEngineLoop:
    """Reads commands, computes, and sends events. The thread that creates it must call `run`, and computes.

    Args:
        max_quiet_s: Longest pause in seconds between two beats of an engine at rest.
    """

    def __init__(
        self,
        channel: FramedPipe,
        config: ControlNetEngineConfig,
        device: torch.device,
        *,
        max_quiet_s: float = 0.0,
    ) -> None:
        self._channel = channel
        dtype = None if config.dtype == AUTO else DTYPES[config.dtype]
        runtime = use_device(device)
        memory = open_memory_plan(runtime, config.device_memory_mib, share=config.device_memory_share)
        weights_bytes = memory.reserve_up_to("ControlNets", config.budget_bytes, share=_WEIGHTS_SHARE)
        self._budget_bytes = weights_bytes
        self._device_memory = DeviceMemoryMeter(runtime, memory)
        self._max_quiet_s = max_quiet_s
        self._reported = pb.ControlNetEngineBeat()
        self._beaten_s = 0.0
        self._stirred_s = time.monotonic()
        self._executor = BatchExecutor(
            max_rows=config.max_rows, fixed_rows=config.fixed_rows, device=runtime, memory=memory
        )
        self._registry = ModelRegistry(budget_bytes=weights_bytes, device=device, dtype=dtype, alive=self._alive)
        self._links = ControlNetLinks(
            config,
            registry=self._registry,
            executor=self._executor,
            devices=device_links(config.links.devices, device, budget=memory),
        )
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        ready = pb.ControlNetEngineReady(device=str(device), dtype=config.dtype)
        self._send(pb.ControlNetEngineEvent(ready=ready))

    def run(self) -> None:
        """Serve until the pipe closes, which ends the process."""
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        while True:
            self._executor.run_batch(self._pause_s)
            self._device_memory.look_if_due()
            self._beat_if_due()

    @property
    def _pause_s(self) -> float:
        """Seconds that an idle engine waits for a step or a command."""
        if time.monotonic() - self._stirred_s <= _REST_AFTER_S:
            return _BEAT_S
        in_use = any(net.sessions or net.state == HOSTED_STATE_LOADING for net in self._reported.controlnets)
        return _BEAT_S if in_use else max(_BEAT_S, self._max_quiet_s)

    def _read_commands(self) -> None:
        while (frame := self._channel.recv()) is not None:
            self._stirred_s = time.monotonic()
            command = pb.ControlNetEngineCommand.FromString(frame)
            match command.WhichOneof("command"):
                case "host":
                    self._disk.submit(self._host, command.host)  # hashing a ControlNet takes seconds
                case "prefetch":
                    self._registry.drop(command.prefetch.unneeded)
                    self._registry.prefetch(command.prefetch.names, retry=command.prefetch.retry)
                case "pin":
                    self._registry.pin(command.pin.names)
                case "open_link":
                    result = answer_link_request(self._links, command.open_link)
                    self._send(pb.ControlNetEngineEvent(link_result=result))
                case "drain":
                    self._links.drain()
            self._executor.wake()  # the engine may have been at rest
        self._links.close()  # its socket leaves no file behind
        os._exit(0)  # the front is gone, and no other process would find this engine

    def _host(self, command: pb.ControlNetEngineHost) -> None:
        hosted = pb.ControlNetEngineHosted(request=command.request)
        try:
            root = Path(command.root) if command.root else None
            hosted.controlnet.CopyFrom(self._registry.add(command.name, Path(command.folder), root))
        except Exception as error:  # noqa: BLE001 - the boundary of a command: its failure must not affect others
            hosted.error.CopyFrom(to_job_error(to_job_failure(error)))
        self._send(pb.ControlNetEngineEvent(hosted=hosted))

    def _alive(self) -> None:
        self._executor.report_progress()
        self._beat_if_due()

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._beaten_s >= _BEAT_S:
            self._beaten_s = time.monotonic()
            beat = self._beat()
            self._send(pb.ControlNetEngineEvent(beat=beat))
            beat.ClearField("links")  # its counters change with every ping
            beat.device_memory.ClearField("free_bytes")  # other processes change it
            if beat != self._reported:
                self._reported, self._stirred_s = beat, self._beaten_s

    def _beat(self) -> pb.ControlNetEngineBeat:
        counts = self._registry.cache.counts
        draining = self._links.draining  # read before the sessions are counted
        return pb.ControlNetEngineBeat(
            turns=self._executor.batches,
            busy=self._executor.busy,
            controlnets=self._registry.report(self._links.sessions, self._executor.times),
            used_bytes=self._registry.cache.used_bytes,
            hits=counts.hits,
            misses=counts.misses,
            loads=counts.loads,
            failures=counts.failures,
            evictions=counts.evictions,
            rows=self._executor.rows,
            forward_s=self._executor.seconds,
            links=link_counts(self._links.counters, open_links=len(self._links.handlers)),
            draining=draining,
            device_memory=self._device_memory.last,
            queued_rows=self._executor.queued_rows,
            budget_bytes=self._budget_bytes,
        )

    def _send(self, event: pb.ControlNetEngineEvent) -> None:
        self._channel.send(event.SerializeToString())

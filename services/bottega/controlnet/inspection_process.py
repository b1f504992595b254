"""The inspection process, which checks ControlNets that callers add, until its pipe closes.

It is started as `python -m bottega.controlnet.inspection_process --fd N`. It builds untrusted configurations without
weights, and compares them with the headers of their files. If that takes too much memory or time, only this process is
lost. Its parent sets a deadline. The process itself also bounds the processor time and memory of a call, so that the
bounds hold without a parent, too. Its first answer says that it is ready.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
from pathlib import Path

from bottega.device.engine_start import lean_imports
from bottega.errors import BottegaError, ControlNetUnusable
from bottega.process.child import FramedPipe
from bottega.rpc.operation import logs
from bottega.rpc.status import to_job_error
from bottega.v1 import controlnet_engine_pb2 as pb

_log = logging.getLogger(__name__)

# Limits of one check. The largest accepted ControlNet needs 1.2 s and 50 MiB on the development machine.
_CPU_S = 20.0
_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Serve until the other end of the pipe closes."""
    parser = argparse.ArgumentParser(
        description="Bottega's check of added ControlNets; the ControlNet server starts it"
    )
    parser.add_argument("--fd", type=int, required=True)
    channel = FramedPipe.from_fd(parser.parse_args().fd)
    logs.configure("inspection", "info")
    with lean_imports():
        import torch
        from diffusers.utils import logging as diffusers_logging

    diffusers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    _bound_memory()
    channel.send(pb.ControlNetEngineHosted().SerializeToString())
    while (frame := channel.recv()) is not None:
        channel.send(_answer(pb.ControlNetEngineHost.FromString(frame)).SerializeToString())


def _bound_memory() -> None:
    """Limit the memory to a little more than the libraries have reserved: gigabytes in some builds of torch."""
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        reserved = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (reserved + _MEMORY_BYTES,) * 2)


def _answer(call: pb.ControlNetEngineHost) -> pb.ControlNetEngineHosted:
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # SIGPROF ends the process
    answer = pb.ControlNetEngineHosted(request=call.request)
    try:
        _inspect(call)
    except BottegaError as error:
        answer.error.CopyFrom(to_job_error(error))
    except MemoryError:
        why = f"ControlNet {call.name} cannot be used: checking it takes more memory than allowed"
        answer.error.CopyFrom(to_job_error(ControlNetUnusable(why)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _inspect(call: pb.ControlNetEngineHost) -> None:
    import torch

    from bottega.addons.controlnets.engine import check_weights, find_controlnet

    root = Path(call.root) if call.root else None
    check_weights(find_controlnet(call.name, Path(call.folder), base=None, dtype=torch.float32, root=root))


if __name__ == "__main__":
    main()

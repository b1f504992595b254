"""An inspection process: `python -m bottega.controlnet.inspection_process --fd N` looks at ControlNets that callers
add, until its pipe closes.

Untrusted configurations are built here, without weights, and compared with the headers of theirs: what that takes
of memory or time takes only this process along. Its parent sets a deadline; what one call may take of processor and
memory is bounded here, so that the bounds hold without a parent, too. The first answer says that it is ready.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
from pathlib import Path

from bottega.diffusion.lean_imports import lean_imports
from bottega.errors import BottegaError, ControlNetUnusable
from bottega.process import FramedPipe
from bottega.rpc.operation import logs
from bottega.rpc.status import to_job_error
from bottega.v1 import controlnet_engine_pb2 as pb

_log = logging.getLogger(__name__)

# The largest that is taken needs 1.2 s and 50 MiB, measured on the development machine.
_CPU_S = 20.0
_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Serves until the other end of the pipe closes."""
    parser = argparse.ArgumentParser(description="Bottega's look at added ControlNets; started by their server")
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
    """To what the libraries have reserved by now, which is gigabytes with some builds of torch, and little more."""
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
        why = f"ControlNet {call.name} cannot be used: to look at it takes more memory than it may"
        answer.error.CopyFrom(to_job_error(ControlNetUnusable(why)))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _inspect(call: pb.ControlNetEngineHost) -> None:
    import torch

    from bottega.diffusion.controlnets import check_weights, find_controlnet

    root = Path(call.root) if call.root else None
    check_weights(find_controlnet(call.name, Path(call.folder), base=None, dtype=torch.float32, root=root))


if __name__ == "__main__":
    main()

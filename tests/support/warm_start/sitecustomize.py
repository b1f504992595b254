"""Python imports this module whenever it starts below `make test`: an engine process has itself forked, warm.

An engine process spends four of its first five seconds on importing torch, transformers and Diffusers. Where the
server of `tests.support.warm_engines` runs, the new process asks it for a fork that has imported them, with this
process's arguments, environment and open files, and then only stands for it: it ends as the fork ends, and the fork is
killed when it is. Where the server refuses or is not there, the process goes on and imports for itself.
"""

import os
import sys

CONVERSION = "bottega.worker.conversion"
INSPECTION = "bottega.controlnet.inspection_process"
ENGINES = (
    *("bottega.worker.engine.main", "bottega.controlnet.engine"),
    *("tests.support.conversion_memory", "tests.support.shared_loras"),
)
SERVER = "TESTS_WARM_ENGINES"
"""Environment variable with the socket of the server."""
COLD = {SERVER: ""}
"""Environment of processes whose engines are no forks, as those whose memory is measured."""
FORKED = b"forked"
# What a fork has from the server, for better or worse.
_PREFIXES = ("CUDA", "GLIBC", "GOMP", "HF_", "LD_", "MALLOC", "MKL", "OMP", "OPENBLAS", "TORCH", "TRITON")
_NAMESPACES = ("mnt", "net", "pid", "user")
CORE_LIMIT = 1
"""Place of the limit of core dumps among the limits of `traits`. A parent may set it when the process has begun."""


def traits() -> dict[str, object]:
    """Return what a process cannot change when it runs, or what its libraries read when they were imported."""
    import resource

    limits = (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
    return {
        "user": [os.getuid(), os.getgid()],
        "limits": [list(resource.getrlimit(limit)) for limit in limits],
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES],  # noqa: PTH116 - see "folder"
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def stand_for_a_fork(server: str, module: str, arguments: list[str]) -> None:
    """Return only if there is no fork."""
    import json
    import signal
    import socket

    pipe = int(arguments[arguments.index("--fd") + 1]) if "--fd" in arguments else 0  # a conversion has stdin alone
    order = {
        "module": module,
        "arguments": arguments,
        "pipe": pipe,
        "process": os.getpid(),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib takes as long to import as all else here
        "path": sys.path,
        "environment": dict(os.environ),
        "traits": traits(),
    }
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(server)
        socket.send_fds(link, [json.dumps(order).encode()], [0, 1, 2, *([pipe] if pipe else [])])
        forked = link.recv(64) == FORKED
    except OSError:
        forked = False
    if not forked:
        link.close()
        return
    if pipe:
        os.close(pipe)
    code = int(link.recv(64) or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if os.environ.get(SERVER) and sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in (*ENGINES, CONVERSION, INSPECTION):
    stand_for_a_fork(os.environ[SERVER], sys.orig_argv[2], sys.orig_argv[3:])

"""`python -m bottega.process.sandbox [--writes] MODULE ARGUMENTS` becomes MODULE, with less than its user may do.

Processes that open untrusted files run in it (`ChildProcess.start(confined=True)`): an attacker that takes over a
decoder finds no network, no way to start programs, and no files to write. Everything here is as far as the machine lets
an ordinary user: what it refuses is left out, and the module runs all the same; `sandbox_status.found` says what is in
force.

--writes: the module may write to files, as its user may.
"""

from __future__ import annotations

import ctypes
import runpy
import sys

from bottega.process import seccomp

# <linux/prctl.h>, <linux/sched.h>
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Confines this process and runs the module. Call it before there are threads: the kernel asks for that."""
    arguments = sys.argv[1:]
    writes = arguments[0] == "--writes"
    module, *rest = arguments[1:] if writes else arguments
    confine(writes=writes)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def confine(*, writes: bool) -> None:
    """Of this process and whatever it starts, and for good. writes: to files."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A network of its own, with nothing in it. Root may have one at once and stays root with files; others need to be
    # root of a user namespace, which not every machine lets them be.
    if library.unshare(_CLONE_NEWNET) != 0:
        library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    seccomp.restrict(writes=writes)


if __name__ == "__main__":
    main()

"""`python -m bottega.process.sandbox [--writes] MODULE ARGUMENTS` runs MODULE with fewer rights than its user has.

Processes that open untrusted files run in it (`ChildProcess.start(confined=...)`). An attacker that takes over a
decoder has no network, cannot start programs, and cannot write files. Each restriction is applied only if the machine
lets an ordinary user apply it; the module runs in any case, and `sandbox_status.found` reports what is in force.

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
    """Confine this process and run the module. Call it before there are threads: the kernel requires that."""
    arguments = sys.argv[1:]
    writes = arguments[0] == "--writes"
    module, *rest = arguments[1:] if writes else arguments
    confine(writes=writes)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def confine(*, writes: bool) -> None:
    """Confine this process and its children for good.

    Args:
        writes: Whether it may write to files.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # An empty network namespace. Root may have one directly and keeps its access to files. Others need a user namespace
    # first, which not every machine allows.
    if library.unshare(_CLONE_NEWNET) != 0:
        library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    seccomp.restrict(writes=writes)


if __name__ == "__main__":
    main()

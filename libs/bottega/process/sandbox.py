"""`python -m bottega.process.sandbox [--writes] MODULE ARGUMENTS` runs MODULE with fewer rights than its user has.

Processes that open untrusted files run in it (`ChildProcess.start(confined=...)`). An attacker that takes over a
decoder has no network, cannot start programs, and cannot write files. Each restriction is applied only if the machine
lets an ordinary user apply it. The module runs in any case; `limited_process.sandbox_status` reports the restrictions
that apply.

The process may only make system calls that read, compute and answer. Everything else fails with "operation not
permitted", including new sockets, new programs, and signals to other processes. libseccomp does the work, through its
own Python module (`seccomp`, which distributions ship) or one with the same interface (`pyseccomp`, in the extra
`sandbox`). If neither can be imported, there is no filter.

--writes: the module may write to files, as its user may.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import runpy
import sys
from typing import Any

# <linux/prctl.h>, <linux/sched.h>
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_LIBRARIES = ("seccomp", "pyseccomp")

_MEMORY = ("brk", "madvise", "mlock", "mmap", "mprotect", "mremap", "munmap", "munlock", "membarrier")
_THREADS = ("futex", "rseq", "sched_getaffinity", "sched_yield", "set_robust_list", "set_tid_address", "arch_prctl")
_SIGNALS = ("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigtimedwait", "sigaltstack", "restart_syscall")
_CLOCKS = (
    "clock_getres",
    "clock_gettime",
    "clock_nanosleep",
    "getitimer",
    "gettimeofday",
    "nanosleep",
    "setitimer",
    "time",
)
_SELF = ("exit", "exit_group", "getcwd", "getegid", "geteuid", "getgid", "getpid", "getppid", "getrandom", "getresgid")
_SELF_TOO = ("getresuid", "getrlimit", "getrusage", "gettid", "getuid", "sysinfo", "times", "umask", "uname")
# Calls on open files, and on the socket that this process was given.
_OPEN_FILES = ("close", "close_range", "dup", "dup2", "dup3", "fadvise64", "fcntl", "fstat", "fstatfs", "getdents64")
_OPEN_FILES_TOO = ("lseek", "pread64", "preadv", "pwrite64", "read", "readv", "write", "writev")
_THE_SOCKET = ("getpeername", "getsockname", "getsockopt", "poll", "ppoll", "pselect6", "recvfrom", "recvmsg", "select")
_THE_SOCKET_TOO = ("sendmsg", "sendto", "setsockopt", "shutdown")
# Python looks for modules, even long after its start.
_PATHS = ("access", "faccessat", "faccessat2", "lstat", "newfstatat", "readlink", "readlinkat", "stat", "statx")
_ALLOWED = (
    *(*_MEMORY, *_THREADS, *_SIGNALS, *_CLOCKS, *_SELF, *_SELF_TOO),
    *(*_OPEN_FILES, *_OPEN_FILES_TOO, *_THE_SOCKET, *_THE_SOCKET_TOO, *_PATHS),
)
_WRITING = ("fallocate", "fdatasync", "fsync", "ftruncate")

# From <linux/sched.h>: a thread, not a process.
_CLONE_THREAD = 0x00010000
# From <asm-generic/ioctls.h>: check for a terminal, and flags of a descriptor. Other requests can type into a terminal.
_TCGETS, _FIONBIO, _FIONREAD, _FIONCLEX, _FIOCLEX = 0x5401, 0x5421, 0x541B, 0x5450, 0x5451
_WRITE_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Confine this process and run the module. Call it before there are threads: the kernel requires that."""
    arguments = sys.argv[1:]
    writes = arguments[0] == "--writes"
    module, *rest = arguments[1:] if writes else arguments
    confine(writes=writes)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def confine(*, writes: bool) -> None:
    """Remove network access and most system calls from this process and its children. This cannot be undone.

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
    restrict_calls(writes=writes)


def restrict_calls(*, writes: bool) -> bool:
    """Restrict the system calls of this process and all its threads. This cannot be undone.

    Returns:
        False if the machine has no libseccomp for Python, or no support for filters.

    Args:
        writes: Whether it may write to files.
    """
    library = _library()
    if library is None:
        return False
    try:
        _filter(library, writes).load()
    except (OSError, ValueError):  # the kernel has no filters, or libseccomp is too old for the rules
        return False
    return True


def _library() -> Any:
    for name in _LIBRARIES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):  # pyseccomp is installed but libseccomp is not
            continue
    return None


def _filter(library: Any, writes: bool) -> Any:
    found = library.SyscallFilter(library.ERRNO(errno.EPERM))
    for name in (*_ALLOWED, *(_WRITING if writes else ())):
        _allow(library, found, name)
    _allow(library, found, "clone", library.Arg(0, library.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    # clone3's flags are in memory, where no filter can read them. The C library falls back to clone.
    found.add_rule(library.ERRNO(errno.ENOSYS), "clone3")
    # Only threads of this process: abort() needs it.
    _allow(library, found, "tgkill", library.Arg(0, library.EQ, os.getpid()))
    _allow(library, found, "prlimit64", library.Arg(2, library.EQ, 0))  # reads limits, and sets none
    for request in (_TCGETS, _FIONBIO, _FIONREAD, _FIONCLEX, _FIOCLEX):
        _allow(library, found, "ioctl", library.Arg(1, library.EQ, request))
    for name, flags in (("open", 1), ("openat", 2)):
        if writes:
            _allow(library, found, name)
        else:
            _allow(library, found, name, library.Arg(flags, library.MASKED_EQ, _WRITE_FLAGS, os.O_RDONLY))
    return found


def _allow(library: Any, found: Any, name: str, *arguments: Any) -> None:
    try:
        found.add_rule(library.ALLOW, name, *arguments)
    except (OSError, ValueError):  # not a system call of this architecture
        return


if __name__ == "__main__":
    main()

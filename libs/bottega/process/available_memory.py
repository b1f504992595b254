"""How much more memory this process can have before the kernel ends a process: what the machine and its cgroups leave.

Pages of files count as available, as in the kernel's own `MemAvailable`: they are dropped before anything is ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the available bytes; None where the system does not report them, as outside Linux.

    This takes about a tenth of a millisecond.

    Args:
        root: Where `proc` and `sys` are.
    """
    try:
        of_machine = 1024 * _numbers(root / "proc" / "meminfo")["MemAvailable"]
    except (OSError, KeyError):
        return None
    return min([of_machine, *_of_cgroups(root)])


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of each control group of this process with a limit, in both versions of cgroups."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys" / "fs" / "cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            yield from _left(mounts, path, limit="memory.max", usage="memory.current", prefix="")
        elif "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"}
            yield from _left(mounts / "memory", path, **names, prefix="total_")


def _left(mount: Path, path: str, *, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Yield the remaining bytes of a group and of its parents.

    In a container the path may be one of the machine's, of which only the container's own group is mounted.
    """
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents) if ".." not in own.parts else (Path(),):
        folder = mount / group
        try:
            limit_bytes = int((folder / limit).read_text(encoding="ascii"))
            used_bytes = int((folder / usage).read_text(encoding="ascii"))
            pages = _numbers(folder / "memory.stat")
        except (OSError, ValueError):
            continue  # it has no limit ("max"), or is not mounted here
        of_files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        yield max(0, limit_bytes - used_bytes + of_files)


def _numbers(path: Path) -> Mapping[str, int]:
    """Return the numbers of a file that has a name and a number a line."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}

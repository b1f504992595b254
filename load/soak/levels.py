"""What a suite takes of its machine, sample by sample, and whether that has grown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import quantiles

import psutil

# Shares of a run: budgets fill in the first tenth; the level is what is taken then, and the end is compared with it.
FILLED, LEVEL_ENDS, END_BEGINS = 0.1, 0.25, 0.85
# From here on faults are those of the beginning again: what a suite takes goes up and down by some hundredths with how
# long ago its services were started, and growth is less than that.
AGAIN = END_BEGINS - FILLED
WANTED_GROWTH = 0.01
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of all processes of a suite. at_s: since the beginning of the run.

    memory_bytes: proportional set size, where what is shared counts once. descriptors: open ones. shared_bytes: of
    memory files. disk_bytes: that the state takes.
    """

    at_s: float
    memory_bytes: int
    descriptors: int
    shared_bytes: int
    disk_bytes: int


MEASURED = tuple(field.name for field in fields(Sample) if field.name != "at_s")


def take_sample(at_s: float, services: Mapping[str, Sequence[psutil.Process]], state: Path) -> Sample:
    """As it is now. A process that ends meanwhile is left out."""
    memory_bytes = descriptors = 0
    shared: dict[tuple[int, int], int] = {}
    for process in (each for processes in services.values() for each in processes):
        try:
            memory_bytes += process.memory_full_info().pss
            files = list(_memory_files(process.pid))
            descriptors += process.num_fds()
        except (psutil.Error, OSError):
            continue
        shared |= files
    return Sample(
        at_s=at_s,
        memory_bytes=memory_bytes,
        descriptors=descriptors,
        shared_bytes=sum(shared.values()),
        disk_bytes=_disk_bytes(state),
    )


def levels(samples: Sequence[Sample], length_s: float) -> Mapping[str, tuple[float, float]]:
    """Of each measure its level once budgets are full, and at the end.

    Each is the upper quartile of its part of the run: what was just started again takes less for a while, and says
    nothing of what the others have piled up. Raises ValueError where a part has too few samples to say.
    """
    full = [sample for sample in samples if FILLED * length_s < sample.at_s <= LEVEL_ENDS * length_s]
    last = [sample for sample in samples if sample.at_s > END_BEGINS * length_s]
    if min(len(full), len(last)) < 2:
        raise ValueError(f"{len(full)} and {len(last)} samples are too few to compare")
    return {name: (_upper(full, name), _upper(last, name)) for name in MEASURED}


def growth(level: tuple[float, float]) -> float:
    """From the level to the end, as a share; what was nothing and is something has grown without end."""
    before, after = level
    if before <= 0.0:
        return 0.0 if after <= 0.0 else float("inf")
    return after / before - 1.0


def as_row(sample: Sample) -> Mapping[str, float]:
    """For a table."""
    return asdict(sample)


def _upper(samples: Sequence[Sample], name: str) -> float:
    return float(quantiles([getattr(sample, name) for sample in samples], n=4, method="inclusive")[2])


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Those that a process has open: which they are, and the bytes that they take."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(("/memfd:", "/dev/shm/")):
                status = entry.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue  # it was closed meanwhile


def _disk_bytes(folder: Path) -> int:
    """That files of a folder take, those that go meanwhile left out."""
    taken = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                taken += (Path(place) / name).lstat().st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                continue
    return taken

"""Resources that a suite takes of its machine, sample by sample, whether they have grown, and a plot of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import quantiles

import matplotlib as mpl
import psutil

# Shares of a run: budgets fill in the first tenth; the level is what is taken then, and the end is compared with it.
FILLED, LEVEL_ENDS, END_BEGINS = 0.1, 0.25, 0.85
# From here on faults are those of the beginning again: what a suite takes goes up and down by some hundredths with how
# long ago its services were started, and growth is less than that.
AGAIN = END_BEGINS - FILLED
WANTED_GROWTH = 0.01
_BLOCK_BYTES = 512
_MIB = 1 << 20
_CURVES = (
    ("memory (PSS), MiB", "memory_bytes", _MIB),
    ("descriptors", "descriptors", 1),
    ("shared memory, MiB", "shared_bytes", _MIB),
    ("disk, MiB", "disk_bytes", _MIB),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resources of all processes of a suite."""

    at_s: float
    """Seconds since the beginning of the run."""
    memory_bytes: int
    """Proportional set size, where what is shared counts once."""
    descriptors: int
    """Open ones."""
    shared_bytes: int
    """Bytes of memory files."""
    disk_bytes: int
    """Bytes that the state takes."""


MEASURED = tuple(field.name for field in fields(Sample) if field.name != "at_s")


def take_sample(at_s: float, services: Mapping[str, Sequence[psutil.Process]], state: Path) -> Sample:
    """Measure now. A process that ends meanwhile is left out."""
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
    """Return for each measure its level once budgets are full, and at the end.

    Each is the upper quartile of its part of the run: a service that was just started again takes less for a while,
    which has no bearing on what the others have piled up. Raises ValueError where a part has too few samples.
    """
    full = [sample for sample in samples if FILLED * length_s < sample.at_s <= LEVEL_ENDS * length_s]
    last = [sample for sample in samples if sample.at_s > END_BEGINS * length_s]
    if min(len(full), len(last)) < 2:
        raise ValueError(f"{len(full)} and {len(last)} samples are too few to compare")
    return {name: (_upper(full, name), _upper(last, name)) for name in MEASURED}


def growth(level: tuple[float, float]) -> float:
    """Return the growth from the level to the end, as a share; from nothing to something it is infinite."""
    before, after = level
    if before <= 0.0:
        return 0.0 if after <= 0.0 else float("inf")
    return after / before - 1.0


def draw_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write a picture as PNG: a curve for each measure, the first tenth shaded."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(_CURVES), sharex=True, figsize=(10, 9), layout="constrained")
    minutes = [sample.at_s / 60.0 for sample in samples]
    for axis, (label, name, unit) in zip(axes, _CURVES, strict=True):
        axis.plot(minutes, [getattr(sample, name) / unit for sample in samples], linewidth=1.2)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.axvspan(0, FILLED * minutes[-1], color="#e6e9ee")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes; budgets fill in the shaded part")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _upper(samples: Sequence[Sample], name: str) -> float:
    return float(quantiles([getattr(sample, name) for sample in samples], n=4, method="inclusive")[2])


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the memory files that a process has open: their identity and bytes."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(("/memfd:", "/dev/shm/")):
                status = entry.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue  # it was closed meanwhile


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that files of a folder take, without those that go meanwhile."""
    taken = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                taken += (Path(place) / name).lstat().st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                continue
    return taken

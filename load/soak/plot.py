"""The samples of a soak as a picture: one curve for each measure, the first tenth shaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from load.soak.levels import FILLED, Sample

_MIB = 1 << 20
_CURVES = (
    ("memory (PSS), MiB", "memory_bytes", _MIB),
    ("descriptors", "descriptors", 1),
    ("shared memory, MiB", "shared_bytes", _MIB),
    ("disk, MiB", "disk_bytes", _MIB),
)


def draw_samples(samples: Sequence[Sample], path: Path) -> None:
    """Writes it as PNG."""
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

"""Converts two files, and prints how many bytes more than for the first one the second one has taken at most.

`python -m tests.support.conversion_memory FILE FOLDER FILE FOLDER`
"""

from __future__ import annotations

import sys
from pathlib import Path

from bottega.process.memory import keep_freed_memory
from bottega.worker.conversion.folder import convert_file


def main(arguments: list[str]) -> None:
    keep_freed_memory()
    peaks_bytes = []
    for file, folder in (arguments[:2], arguments[2:]):
        convert_file(Path(file), Path(folder))
        peaks_bytes.append(_peak_bytes())
    print(peaks_bytes[1] - peaks_bytes[0], flush=True)


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main(sys.argv[1:])

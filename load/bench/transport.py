"""What does moving tensors between two processes of one host take: links against memcpy, Gloo pairs and grpc.aio?

A message is moved into memory that is there already, and acknowledged; all ways take turns in one run, and medians are
compared. 108 MiB are the residuals of SDXL's ControlNet for the two rows of one guided request, in fp16.

A run takes 1 minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from load.bench.framework import Bench, Option, Sheet
from load.bench.transport_ways import Message, Way, all_ways

# Bytes, and how many messages a turn of one way has, after one that is not counted.
SIZES = {"4 KiB": (4 << 10, 50), "1 MiB": (1 << 20, 20), "16 MiB": (16 << 20, 4), "108 MiB": (108 << 20, 2)}
BY_REFERENCE_TIMES = 50
LARGEST = "108 MiB"
WARM_UPS = 2
# What the way before has left to be freed is not the next one's.
PAUSE_S = 0.02
BENCH = Bench(__file__, __doc__, Option("--rounds", 15, "turns of every way, for each size", smallest=1))


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure every size."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with all_ways() as ways:
        seconds = {size: _median_s(ways, size, options.rounds) for size in SIZES}
    for size, by_way in seconds.items():
        for way, value in by_way.items():
            sheet.row(f"{way}, {size}", f"{value * 1e6:,.0f} us")
    at = seconds[LARGEST]
    grpc_s = min(at["grpc.aio, streamed"], at["grpc.aio, unary"])
    copied, inplace = at["memfd, copied in"], at["memfd, written in place"]
    ratio = copied / at["memcpy"]
    sheet.figure("memfd with a copy over memcpy", ratio, key="memfd_copy_vs_memcpy", bar="up to 1.25")
    sheet.figure("memfd written in place", inplace * 1e6, "{:.0f} us", key="memfd_inplace_us", bar="below 50 us")
    sheet.figure("TCP over a Gloo pair", at["TCP, plain"] / at["Gloo pair"], key="tcp_vs_gloo", bar="up to 1.15")
    what, ratio = "sealed TCP over plain, bytes a second", at["TCP, plain"] / at["TCP, sealed"]
    sheet.figure(what, ratio, key="sealed_over_plain", bar="at least .5")
    what, key = "best way of gRPC over memfd with a copy", "grpc_vs_memfd"
    sheet.figure(what, grpc_s / copied, "{:.1f}", key=key, bar="at least 10")
    sheet.figure("  over memfd written in place", grpc_s / inplace, "{:.0f}", key="grpc_vs_memfd_inplace")
    sheet.figure("  over memcpy", grpc_s / at["memcpy"], "{:.1f}", key="grpc_vs_memcpy")
    sheet.values |= {"memcpy_ms": at["memcpy"] * 1e3, "rounds": options.rounds}


def _median_s(ways: Mapping[str, Way], size: str, rounds: int) -> dict[str, float]:
    """Return the seconds of one message of that size, by way."""
    size_bytes, copied_times = SIZES[size]
    message = Message.of(size_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UPS + rounds):
        start = number % len(ways)  # none always follows the same
        for name in (*list(ways)[start:], *list(ways)[:start]):
            times = BY_REFERENCE_TIMES if ways[name].by_reference else copied_times
            ways[name].prepare(message, times + 1)
            time.sleep(PAUSE_S)
            ways[name].move(message)  # wakes processes that had slept
            began = time.perf_counter()
            for _ in range(times):
                ways[name].move(message)
            if number >= WARM_UPS:
                seconds[name].append((time.perf_counter() - began) / times)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(BENCH.command())

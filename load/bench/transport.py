"""What moving tensors between two processes of one host takes: links against memcpy, Gloo pairs and grpc.aio.

A message is moved into memory that is there already, and acknowledged; all ways take turns in one run, and medians are
compared. 108 MiB are the residuals of SDXL's ControlNet for the two rows of one guided request, in fp16.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping
from statistics import median

from load.bench.report import report
from load.bench.transport_ways import Message, Way, all_ways

# Bytes, and how many messages a turn of one way has, after one that is not counted.
SIZES = {"4 KiB": (4 << 10, 50), "1 MiB": (1 << 20, 20), "16 MiB": (16 << 20, 4), "108 MiB": (108 << 20, 2)}
BY_REFERENCE_TIMES = 50
LARGEST = "108 MiB"
WARM_UPS = 2
# What the way before has left to be freed is not the next one's.
PAUSE_S = 0.02

Seconds = Mapping[tuple[str, str], float]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of every way, for each size")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with all_ways() as ways:
        names = list(ways)
        seconds = {(size, way): value for size in SIZES for way, value in _measure(ways, size, options.rounds).items()}
    _report(names, seconds, options.rounds)


def _measure(ways: Mapping[str, Way], size: str, rounds: int) -> dict[str, float]:
    """Median seconds of one message of that size, by way."""
    size_bytes, copied_times = SIZES[size]
    message = Message.of(size_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UPS + rounds):
        for name in _turned(list(ways), number):
            times = BY_REFERENCE_TIMES if ways[name].by_reference else copied_times
            ways[name].prepare(message, times + 1)
            time.sleep(PAUSE_S)
            ways[name].move(message)  # wakes who had slept
            began = time.perf_counter()
            for _ in range(times):
                ways[name].move(message)
            if number >= WARM_UPS:
                seconds[name].append((time.perf_counter() - began) / times)
    return {name: median(values) for name, values in seconds.items()}


def _turned(names: list[str], by: int) -> list[str]:
    """The names from another one on each time: none always follows the same."""
    start = by % len(names)
    return names[start:] + names[:start]


def _report(ways: list[str], seconds: Seconds, rounds: int) -> None:
    at = {way: seconds[LARGEST, way] for way in ways}
    grpc_s = min(at["grpc.aio, streamed"], at["grpc.aio, unary"])
    values = {
        "memfd_copy_vs_memcpy": at["memfd, copied in"] / at["memcpy"],
        "memfd_inplace_us": at["memfd, written in place"] * 1e6,
        "tcp_vs_gloo": at["TCP, plain"] / at["Gloo pair"],
        "sealed_over_plain": at["TCP, plain"] / at["TCP, sealed"],
        "grpc_vs_memfd": grpc_s / at["memfd, copied in"],
        "grpc_vs_memfd_inplace": grpc_s / at["memfd, written in place"],
        "grpc_vs_memcpy": grpc_s / at["memcpy"],
        "memcpy_ms": at["memcpy"] * 1e3,
        "rounds": rounds,
    }
    rows = [(f"{way}, {size}", f"{seconds[size, way] * 1e6:,.0f} us", "") for size in SIZES for way in ways]
    rows += [
        (
            "memfd with a copy over memcpy (memfd_copy_vs_memcpy)",
            f"{values['memfd_copy_vs_memcpy']:.2f}",
            "up to 1.25",
        ),
        ("memfd written in place (memfd_inplace_us)", f"{values['memfd_inplace_us']:.0f} us", "below 50 us"),
        ("TCP over a Gloo pair (tcp_vs_gloo)", f"{values['tcp_vs_gloo']:.2f}", "up to 1.15"),
        (
            "sealed TCP over plain, bytes a second (sealed_over_plain)",
            f"{values['sealed_over_plain']:.2f}",
            "at least .5",
        ),
        ("best way of gRPC over memfd with a copy (grpc_vs_memfd)", f"{values['grpc_vs_memfd']:.1f}", "at least 10"),
        ("  over memfd written in place (grpc_vs_memfd_inplace)", f"{values['grpc_vs_memfd_inplace']:.0f}", ""),
        ("  over memcpy (grpc_vs_memcpy)", f"{values['grpc_vs_memcpy']:.1f}", ""),
    ]
    report("transport", rows, values)


if __name__ == "__main__":
    main()

"""Times every kernel and its reference on one device, and compares both with float64: a table, and a line of JSON.

`python -m bottega.kernels.bench`; --help lists the options. On a CPU, kernels are interpreted (TRITON_INTERPRET=1) at
small sizes: the table then shows that everything runs, but not how fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from types import ModuleType

import torch
from torch import Tensor

from bottega.kernels.kernel import TOLERANCES, Case, difference

# Runs on a CPU, where the times mean nothing.
_CPU_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Median times of one case, and the differences of its results from float64; see `difference`."""

    name: str
    dtype: str
    kernel_us: float
    reference_us: float
    moved_bytes: int
    flops: int
    kernel_difference: float
    reference_difference: float
    tolerance: float
    """Upper bound on the kernel's difference."""

    @property
    def speedup(self) -> float:
        """Reference time divided by kernel time."""
        return self.reference_us / self.kernel_us

    @property
    def agrees(self) -> bool:
        """Whether the kernel's difference is within its tolerance."""
        return self.kernel_difference <= self.tolerance


def measure(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Iterator[Measurement]:
    """Measure the cases of every kernel. Raise the error of a kernel that cannot run on this device.

    `small` selects the sizes for an interpreter.
    """
    for module in _modules():
        for case in module.cases(device, dtype, small=small):
            yield _measured(case, device, dtype)


def _modules() -> Sequence[ModuleType]:
    """Import the modules of the kernels, after `main` may have switched on Triton's interpreter."""
    from bottega.kernels import geglu, group_norm_silu, guided_euler, lora_patch, tile_moves, token_moves

    return group_norm_silu, geglu, lora_patch, token_moves, tile_moves, guided_euler


@torch.inference_mode()
def _measured(case: Case, device: torch.device, dtype: torch.dtype) -> Measurement:
    exact = case.exact()
    differences = [difference(run(), exact) for run in (case.kernel, case.reference)]
    time_us = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    return Measurement(
        name=case.name,
        dtype=str(dtype).removeprefix("torch."),
        kernel_us=time_us(case.kernel),
        reference_us=time_us(case.reference),
        moved_bytes=case.moved_bytes,
        flops=case.flops,
        kernel_difference=differences[0],
        reference_difference=differences[1],
        tolerance=TOLERANCES[dtype],
    )


def _time_on_gpu(run: Callable[[], Sequence[Tensor]]) -> float:
    """Return microseconds, measured by events with a cold L2 cache."""
    from triton.testing import do_bench

    return 1000.0 * float(do_bench(run, return_mode="median"))


def _time_on_cpu(run: Callable[[], Sequence[Tensor]]) -> float:
    def once() -> float:
        began_s = perf_counter()
        run()
        return perf_counter() - began_s

    return 1e6 * statistics.median(once() for _ in range(_CPU_RUNS))


def main(arguments: Sequence[str]) -> int:
    """Run the bench, and return the exit status: 1 if a kernel differs by more than its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m bottega.kernels.bench", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=[_name(each) for each in TOLERANCES], default="float16")
    parser.add_argument("--small", action="store_true", help="use small sizes for an interpreter, as always on a CPU")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), next(each for each in TOLERANCES if _name(each) == options.dtype)
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(device)  # Triton launches on the current device.
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Read when the first kernel is imported.
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, interpreted"
    print(f"{where}; torch {torch.__version__}; {options.dtype}\n{_HEAD}")
    made: list[Measurement] = []
    for each in measure(device, dtype, small=options.small or device.type == "cpu"):
        made.append(each)
        print(_line(each), flush=True)
    print(json.dumps({"bench": "kernels", "device": where, "kernels": [_facts(each) for each in made]}))
    return 0 if all(each.agrees for each in made) else 1


_HEAD = f"{'kernel':<42}{'kernel us':>11}{'plain us':>11}{'speedup':>9}{'GB/s':>8}{'TFLOP/s':>9}{'differs':>10}"


def _line(each: Measurement) -> str:
    rates = each.moved_bytes / each.kernel_us / 1e3, each.flops / each.kernel_us / 1e6
    wrong = "" if each.agrees else f"  above {each.tolerance:.1e}"
    return (
        f"{each.name:<42}{each.kernel_us:>11.1f}{each.reference_us:>11.1f}{each.speedup:>9.2f}"
        f"{rates[0]:>8.0f}{rates[1]:>9.2f}{each.kernel_difference:>10.1e}{wrong}"
    )


def _facts(each: Measurement) -> dict[str, object]:
    return {**asdict(each), "speedup": each.speedup, "agrees": each.agrees}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

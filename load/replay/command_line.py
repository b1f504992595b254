"""The options of `python -m load.replay`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from bottega.client.types.options import FidelityName
from load.replay.driver import MAX_IN_FLIGHT
from load.replay.results import LONGEST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for; None is as the mix or the fleet has it."""

    mix: str
    address: str | None
    fleet_address: str | None
    seed: int
    rate: float | None
    minutes: float | None
    burstiness: float | None
    bursts: bool | None
    curve: bool
    trace: Path | None
    model: str | None
    fidelity: FidelityName
    controlnets: tuple[str, ...] | None
    loras: tuple[str, ...] | None
    deadline_s: float
    max_in_flight: int
    histogram: Path | None

    def overrides(self, adapters: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> dict[str, object]:
        """Of a mix's keys. adapters: names for its sections of ControlNets and LoRAs."""
        found: dict[str, object] = {}
        if self.rate is not None:
            found["rate_per_s"] = self.rate
        if self.minutes is not None:
            found["minutes"] = self.minutes
        return (
            found | {"arrivals": self._arrivals()} | {section: {"names": names} for section, names in adapters.items()}
        )

    def _arrivals(self) -> dict[str, object]:
        if self.trace is not None:
            return {"trace": self.trace.absolute(), "curve": None, "bursts": None, "burstiness": self.burstiness}
        found: dict[str, object] = {}
        if self.burstiness is not None:
            found["burstiness"] = self.burstiness
        if self.bursts is not None:
            found["bursts"] = {"times": 10.0} if self.bursts else None
        if not self.curve:
            found["curve"] = None
        return found


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Those of this process, unless others are given. Ends the process for those that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m load.replay",
        description="Sends the requests of a day, or a part of one, to a running suite, at their times.",
    )
    parser.add_argument("--mix", default="day", help="of load/replay/mixes, or a TOML file (default: day)")
    parser.add_argument("--address", help="of the gateway (default: $BOTTEGA_ADDRESS, or the suite that runs here)")
    parser.add_argument("--fleet-address", help="where the gateway lists its services, as of the bottega command")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: 1)")
    parser.add_argument("--rate", type=float, help="requests a second, on average over the run")
    parser.add_argument("--minutes", type=float, help="length of the run")
    parser.add_argument("--burstiness", type=float, help="of the times between requests; 1 is Poisson")
    parser.add_argument("--bursts", action=argparse.BooleanOptionalAction, help="tenfold ones, or none")
    parser.add_argument("--no-curve", dest="curve", action="store_false", help="the same rate at all hours")
    parser.add_argument("--trace", type=Path, help="CSV whose column at_s or timestamp says when requests come")
    parser.add_argument("--model", help="to ask for (default: the only one)")
    parser.add_argument("--fidelity", choices=get_args(FidelityName), default="balanced", help="(default: balanced)")
    parser.add_argument("--controlnets", type=_names, metavar="A,B", help="most popular first (default: the fleet's)")
    parser.add_argument("--loras", type=_names, metavar="A,B", help="the same of LoRAs")
    parser.add_argument(
        "--deadline-s",
        type=_deadline,
        default=60.0,
        metavar="S",
        help="of a request, from when it was meant to go out (60)",
    )
    parser.add_argument(
        "--max-in-flight", type=_count, default=MAX_IN_FLIGHT, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--histogram", type=_new_file, metavar="FILE", help="to write, for HdrHistogram's plotters")
    return Options(**vars(parser.parse_args(arguments)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _new_file(text: str) -> Path:
    """Where one can be written: known before the run, not after it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def _deadline(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be above 0, at most {LONGEST_S:g} seconds")
    return seconds

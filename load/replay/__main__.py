"""Replays a day, or a part of one, to a running suite: `python -m load.replay --mix day --rate 2 --address HOST:PORT`.

The exit status is 0 for a run that has a result, 1 for a void one, and 2 where it could not begin. Ctrl-C stops
sending, waits for what is in flight, and reports what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from bottega import kinds
from bottega.client import AsyncClient, ServedModel
from bottega.client.types.options import FidelityName
from bottega.errors import BottegaError, ConfigError
from load.replay.driver import MAX_IN_FLIGHT, replay
from load.replay.gateway_sender import GatewaySender
from load.replay.mix import Mix, load_mix
from load.replay.pictures import Pictures
from load.replay.plan import plan
from load.replay.report import Progress, by_kind, json_line, table, write_histogram
from load.replay.requests import PlannedRequest
from load.replay.results import LONGEST_S


async def run(options: argparse.Namespace) -> int:
    """Replay, print the report and return the exit status. Raises BottegaError where nothing can be sent."""
    mix = load_mix(options.mix, overrides(options))
    async with AsyncClient(options.address, fleet_address=options.fleet_address) as client:
        model = await _model(client, options.model)
        mix = load_mix(options.mix, overrides(options, await _adapters(client, model, mix, options)))
        requests = plan(mix, options.seed)
        _print_plan(requests, mix, options)
        pictures = Pictures(width=model.default_width, height=model.default_height)
        await asyncio.to_thread(pictures.prepare, requests)
        sender = GatewaySender(
            client, pictures, deadline_s=options.deadline_s, model=model.name, fidelity=options.fidelity
        )
        progress = Progress(sender.send, len(requests))
        with _stopped_by_interrupt() as stop:
            async with progress.shown():
                ran = await replay(
                    requests,
                    progress.send,
                    deadline_s=options.deadline_s,
                    max_in_flight=options.max_in_flight,
                    length_s=mix.length_s,
                    stop=stop,
                )
    runs = by_kind(ran, deadline_s=options.deadline_s, length_s=mix.length_s)
    print(table(runs))
    if options.histogram:
        write_histogram(ran, options.histogram)
    if ran.void:
        print(ran.void, file=sys.stderr)
    print(json_line(options.mix, options.seed, runs), flush=True)
    return 1 if ran.void else 0


async def _model(client: AsyncClient, name: str | None) -> ServedModel:
    """Return the model of that name, or the only one."""
    models = {model.name: model for model in await client.models()}
    if name is None and len(models) == 1:
        (name,) = models
    if name is None or name not in models:
        wanted = f"no model {name}" if name else "no one model to ask for: give --model"
        raise ConfigError(f"{wanted}; {client.address} serves {', '.join(models) or 'none'}")
    return models[name]


async def _adapters(
    client: AsyncClient, model: ServedModel, mix: Mix, options: argparse.Namespace
) -> dict[str, tuple[str, ...]]:
    """Return names for the mix's ControlNets and LoRAs: as given, or as many as it has of those that are there.

    Raises BottegaError where the fleet cannot be asked.
    """
    try:
        nets = options.controlnets
        if nets is None:
            nets = (await _controlnets_for(client, model))[: len(mix.controlnets.names)]
        loras = options.loras
        if loras is None:
            loras = (await _loras_for(client, model))[: len(mix.loras.names)]
    except BottegaError as error:
        raise ConfigError(
            f"the fleet does not tell which ControlNets and LoRAs there are ({error}); "
            "give --fleet-address, or --controlnets and --loras, with '' for none"
        ) from error
    return {"controlnets": nets, "loras": loras}


async def _controlnets_for(client: AsyncClient, model: ServedModel) -> tuple[str, ...]:
    """Return the names of a model's ControlNets. Raises BottegaError where the fleet does not answer."""
    return tuple(dict.fromkeys(net.name for net in await client.controlnets() if model.name in net.models))


async def _loras_for(client: AsyncClient, model: ServedModel) -> tuple[str, ...]:
    """Return the names of a model's LoRAs, none where no store has joined.

    Raises BottegaError where the fleet or a store does not answer.
    """
    fleet = await client.fleet()
    if not any(member.kind == kinds.LORAS for member in fleet.members):
        return ()
    return tuple(lora.name for lora in await client.loras() if lora.base == model.name)


def _print_plan(requests: list[PlannedRequest], mix: Mix, options: argparse.Namespace) -> None:
    edits = sum(request.kind == "edit" for request in requests)
    print(
        f"{options.mix}, seed {options.seed}: {len(requests)} requests in {mix.minutes:g} minutes, "
        f"{edits} of them edits of {len({request.template for request in requests} - {None})} templates"
    )
    for what, names in (("ControlNets", mix.controlnets.names), ("LoRAs", mix.loras.names)):
        print(f"  {what}, the most popular first: {', '.join(names) or 'none'}", flush=True)


@contextmanager
def _stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """Give an event that the first Ctrl-C of the block sets; the next one ends the process."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupted() -> None:
        print("stopped: waiting for what is in flight", file=sys.stderr, flush=True)
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, by default of this process's command line; None is as the mix or the fleet has it."""
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
    parser.add_argument("--trace", type=Path, help="CSV whose column at_s or timestamp has the times of requests")
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
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _new_file(text: str) -> Path:
    """Return the path of a file that can be written: known before the run, not after it."""
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


def overrides(
    options: argparse.Namespace, adapters: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> dict[str, object]:
    """Return the keys of a mix that options change.

    Args:
        options: As `parse` returns them.
        adapters: Names for the mix's sections of ControlNets and LoRAs.
    """
    arrivals: dict[str, object] = {}
    if options.burstiness is not None:
        arrivals["burstiness"] = options.burstiness
    if options.bursts is not None:
        arrivals["bursts"] = {"times": 10.0} if options.bursts else None
    if not options.curve:
        arrivals["curve"] = None
    if options.trace is not None:
        trace = options.trace.absolute()
        arrivals = {"trace": trace, "curve": None, "bursts": None, "burstiness": options.burstiness}
    given = {"rate_per_s": options.rate, "minutes": options.minutes}
    sections = {section: {"names": names} for section, names in adapters.items()}
    return {**{key: value for key, value in given.items() if value is not None}, "arrivals": arrivals, **sections}


def main(arguments: list[str] | None = None) -> int:
    """Run as a command and return the exit status."""
    options = parse(arguments)
    try:
        return asyncio.run(run(options))
    except BottegaError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

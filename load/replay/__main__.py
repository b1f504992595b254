"""Replays a day, or a part of one, to a running suite: `python -m load.replay --mix day --rate 2 --address HOST:PORT`.

It exits with 0 for a run that says something, whatever the suite made of it; with 1 for a void one; with 2 where it
could not begin. Ctrl-C stops sending, waits for what is in flight, and reports what there is.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bottega.client import AsyncClient, ServedModel
from bottega.errors import BottegaError, ConfigError
from load.replay.command_line import Options, parse
from load.replay.driver import replay
from load.replay.fleet_adapters import controlnets_for, loras_for
from load.replay.gateway_sender import GatewaySender
from load.replay.mix import Mix, load_mix
from load.replay.pictures import Pictures
from load.replay.plan import plan
from load.replay.progress import Progress
from load.replay.report import by_kind, json_line, table, write_histogram
from load.replay.requests import PlannedRequest


async def run(options: Options) -> int:
    """The exit status. Raises BottegaError where nothing can be sent."""
    mix = load_mix(options.mix, options.overrides())
    async with AsyncClient(options.address, fleet_address=options.fleet_address) as client:
        model = await _model(client, options.model)
        mix = load_mix(options.mix, options.overrides(await _adapters(client, model, mix, options)))
        requests = plan(mix, options.seed)
        _say_plan(requests, mix, options)
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
    """The one of that name, or the only one."""
    models = {model.name: model for model in await client.models()}
    if name is None and len(models) == 1:
        (name,) = models
    if name is None or name not in models:
        wanted = f"no model {name}" if name else "no one model to ask for: say --model"
        raise ConfigError(f"{wanted}; {client.address} serves {', '.join(models) or 'none'}")
    return models[name]


async def _adapters(client: AsyncClient, model: ServedModel, mix: Mix, options: Options) -> dict[str, tuple[str, ...]]:
    """Names for the mix's ControlNets and LoRAs: those that were given, else as many as it has of those that are there.

    Raises BottegaError where the fleet does not say which there are.
    """
    try:
        nets = options.controlnets
        if nets is None:
            nets = (await controlnets_for(client, model))[: len(mix.controlnets.names)]
        loras = options.loras
        if loras is None:
            loras = (await loras_for(client, model))[: len(mix.loras.names)]
    except BottegaError as error:
        raise ConfigError(
            f"the fleet does not say which ControlNets and LoRAs there are ({error}); "
            "give --fleet-address, or --controlnets and --loras, with '' for none"
        ) from error
    return {"controlnets": nets, "loras": loras}


def _say_plan(requests: list[PlannedRequest], mix: Mix, options: Options) -> None:
    edits = sum(request.kind == "edit" for request in requests)
    print(
        f"{options.mix}, seed {options.seed}: {len(requests)} requests in {mix.minutes:g} minutes, "
        f"{edits} of them edits of {len({request.template for request in requests} - {None})} templates"
    )
    for what, names in (("ControlNets", mix.controlnets.names), ("LoRAs", mix.loras.names)):
        print(f"  {what}, the most popular first: {', '.join(names) or 'none'}", flush=True)


@contextmanager
def _stopped_by_interrupt() -> Iterator[asyncio.Event]:
    """Set by the first Ctrl-C of the block; the next one ends the process, as ever."""
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


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = parse(arguments)
    try:
        return asyncio.run(run(options))
    except BottegaError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

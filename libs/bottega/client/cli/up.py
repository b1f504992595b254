"""`bottega up`: runs the whole suite on this machine, in the foreground or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from bottega.client.addons.addon import left_out_of
from bottega.client.cli.logs import TerminalListener, note_left_out, pretty
from bottega.client.cli.models import note_part, run_import
from bottega.client.cli.options import state_option
from bottega.client.cli.terminal import escaped, escaped_lines, fail, note, say
from bottega.client.instance import AlreadyHeld, StateFolder
from bottega.client.sdk.clients import Client
from bottega.client.suite.plan import SuiteOptions, SuitePlan, plan_suite, suite_models
from bottega.client.suite.service_log import ServiceLog
from bottega.client.suite.service_process import DoesNotStart
from bottega.client.transport.connection import DEFAULT_PORT
from bottega.client.types.fleet import FleetStatus
from bottega.errors import BottegaError
from bottega.manifest import SuiteModel, options_of, read_services
from bottega.miniature import MODELS
from bottega.model_files.family_names import PREDICTION_TYPES
from bottega.state_folder import state_folder

if TYPE_CHECKING:
    from bottega.client.suite.service_process import Supervisor


class _WithServicesOptions(click.Command):
    """A command that adds the options of the manifest's services, and reads the manifest only when they are needed."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        services = [
            click.Option(
                [f"--{option.name.replace('_', '-')}"],
                type=click.IntRange(option.least, option.most),
                default=option.default,
                show_default=True,
                help=option.help,
            )
            for option in options_of(read_services())
        ]
        return [*services, *super().get_params(ctx)]


@click.command("up", cls=_WithServicesOptions)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=["miniature"],
    show_default=True,
    help="Model to serve: miniature, a folder in Diffusers' layout, or a single .safetensors file. May be repeated.",
)
@click.option(
    "--prediction-type",
    type=click.Choice(PREDICTION_TYPES),
    help="What the UNet of a single file predicts, if the file does not tell.",
)
@click.option("--vae", default="", help="VAE in place of the model's own: a folder or a single .safetensors file.")
@click.option(
    "--parts",
    type=click.Path(path_type=Path),
    help="Folder of a model that has the parts that a single file lacks, such as T5 with its tokenizer.",
)
@click.option(
    "--model-name",
    "model_names",
    multiple=True,
    help="Name of the model in requests, once for each --model; default: the name of its folder or repository.",
)
@click.option("--device", default="auto", show_default=True, help="Device of the workers: auto, cpu or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Element type of the model; auto: that of its files on a GPU, on a CPU the faster one of these and float32.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    help="CPU threads of each worker; default: cores divided by workers.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65532),
    default=8470,
    show_default=True,
    help="Port of the gateway, which also uses the next two ports, as HTTP does the third; 0 chooses free ones.",
)
@state_option
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Run in the background, and return when everything is ready; bottega stop ends it.",
)
@click.option("--in-background", is_flag=True, hidden=True, help="Internal: marks the process that --detach starts.")
def command(
    *,
    models: tuple[str, ...],
    prediction_type: str | None,
    vae: str,
    parts: Path | None,
    model_names: tuple[str, ...],
    device: str,
    dtype: str,
    threads: int,
    port: int,
    state: StateFolder,
    detach: bool,
    in_background: bool,
    **services: Any,
) -> None:
    """Run the whole suite on this machine.

    It starts a gateway, workers, a ControlNet server, a LoRA store, an approximate cache, an activation store and an
    HTTP API (OpenAI's for images). Their logs and data are in the state folder.

    ControlNets and LoRAs are served from the folders `controlnets` and `loras` in each model's folder. The built-in
    model has the ControlNets edges and layout, and the LoRAs striped, checked and dusk. bottega loras add adds LoRAs.
    """
    given = SuiteOptions(
        models=models,
        model_names=model_names,
        vae=vae,
        device=device,
        dtype=dtype,
        threads=threads,
        port=port,
        services=services,
    )
    if len(models) > 1 and vae:
        fail("--vae is for a suite of one model", "Put the VAE into the model's folder, or start a suite for it.")
    if len(model_names) > len(models):
        fail(f"--model-name is given {len(model_names)} times, for {len(models)} models")
    options = _with_folders(given, prediction_type or "", parts, state)
    _check_models(options)
    try:
        if detach:
            _detached(options, state)
        else:
            _foreground(options, state, in_background=in_background)
    except AlreadyHeld as held:
        _refuse(state, held.holders)
    except DoesNotStart as error:
        fail(
            error.message,
            [
                *(row for line in error.last_lines for row in pretty(error.name, line)),
                ("bottega doctor looks for causes.",),
            ],
        )
    except OSError as error:
        fail(
            f"the state folder {state.root} cannot be used: {error.strerror}",
            "Give another one: --state FOLDER or BOTTEGA_STATE.",
        )


def _with_folders(options: SuiteOptions, prediction_type: str, parts: Path | None, state: StateFolder) -> SuiteOptions:
    """Return options that name folders in the state folder that are made from the given single files."""
    from bottega.model_files.folder_check import check_model_folder, folder_of, name_of
    from bottega.model_files.importing import import_for_serving, import_vae_for_serving
    from bottega.model_files.single_file import is_single_file
    from bottega.model_files.single_file_check import refusal_of, vae_refusal

    if parts is not None and not (len(options.models) == 1 and is_single_file(options.models[0])):
        fail("--parts is for a suite of one model, which is a single file", "Folders have all of their parts.")
    vae = Path(options.vae) if is_single_file(options.vae) else None
    if vae is not None and not is_single_file(options.models[0]):
        family = check_model_folder(folder_of(options.models[0])).family
        _make_state_for(vae_refusal(vae, family), state)
        folder = run_import(import_vae_for_serving(vae, state.root, family, note_part))
        return replace(options, vae=str(folder))
    models: list[str] = []
    names: list[str] = []
    for model, given in zip_longest(options.models, options.model_names, fillvalue=""):
        found, name = model, given
        if is_single_file(model):
            file = Path(model)
            _make_state_for(refusal_of(file, prediction_type, vae, parts), state)
            importing = import_for_serving(file, state.root, prediction_type, vae, parts=parts, on_part=note_part)
            result = run_import(importing)
            note(result.summary)
            found, name = str(result.folder), given or name_of(str(file.with_suffix("")))
        models.append(found)
        names.append(name)
    return replace(options, models=tuple(models), model_names=tuple(names), vae="" if vae is not None else options.vae)


def _make_state_for(refusal: str, state: StateFolder) -> None:
    """Make the state folder for an import. End the command if the file is refused or another suite runs there."""
    if refusal:
        fail(refusal)
    if state.is_held():
        _refuse(state, state.holders())
    state.make()


def _check_models(options: SuiteOptions) -> None:
    """End the command if workers could not serve a model, or if requests could not name it."""
    from bottega.model_files.folder_check import check_model_folder
    from bottega.rules import MAX_MODEL_CHARACTERS

    names = Counter[str]()
    for model in suite_models(options):
        if model.source in MODELS and not model.folder.is_dir():
            what = f"the embedded model {model.source} is not installed"
            fail(what, "pip install bottega-miniature, or serve your own: --model FOLDER")
        report = check_model_folder(model.folder, vae=Path(options.vae) if options.vae else None)
        if report.refusal:
            fail(report.refusal)
        if report.advice:
            note(f"The model {report.folder} has no preset: {report.advice}")
        if len(model.name) > MAX_MODEL_CHARACTERS:
            what = f"the name has {len(model.name)} characters"
            fail(what, f"Give a name of at most {MAX_MODEL_CHARACTERS}: --model-name NAME")
        names[model.name] += 1
        if names[model.name] > 1:
            fail(f"two models have the name {model.name}", "Give each a name of its own: --model-name NAME, repeated.")


def _foreground(options: SuiteOptions, state: StateFolder, *, in_background: bool) -> None:
    from bottega.client.suite.background import end_orphans

    with state.hold():
        for name in end_orphans(state.read()):
            note(f"Ended {name}, which a killed suite had left running.")
        plan = plan_suite(options, state)
        if others := state.others():
            note(f"The state folder {state.root} {others}.")
        if plan.left_out:
            note(f"Starting without it: {plan.left_out}")
        say(f"Bottega: {_described(plan)}; logs in {state.logs}")
        if not in_background:
            say("Ctrl-C stops it.")
        run_suite(plan, state, in_background=in_background)
    say("Stopped; nothing is left running.")


def _detached(options: SuiteOptions, state: StateFolder) -> None:
    from bottega.client.suite.background import DidNotStart, start_in_background

    began_s = time.monotonic()
    try:
        record = start_in_background(options, state, lambda progress: say(f"  {escaped(progress)}"))
    except DidNotStart as error:
        for line in escaped_lines(error.message):  # these lines already say what to do
            note(line)
        raise SystemExit(1) from None
    with contextlib.suppress(BottegaError), Client(record.address, fleet_address=record.fleet_address) as client:
        for thing in left_out_of(client.fleet()):
            note_left_out(thing)
    say(f"Bottega runs in the background as process {record.pid}; logs in {state.logs}; bottega stop ends it.")
    addresses = (record.address, record.fleet_address, record.http_address)
    say_ready(*addresses, time.monotonic() - began_s, state, command=first_command(suite_models(options)))


def _refuse(state: StateFolder, holders: tuple[int, ...]) -> None:
    """End the command, because other processes hold the lock of the state folder.

    A holder need not be a suite: any process that can open the file can lock it.
    """
    import psutil

    record = state.read()
    for pid in holders:
        try:
            process = psutil.Process(pid)
            uid, user, name = process.uids().real, process.username(), process.name()
        except psutil.Error:
            continue
        if uid != os.geteuid() and (record is None or record.pid != pid):
            fail(
                f"the lock of the state folder {state.root} is held by process {pid} ({name}) of {user}",
                "No suite of yours runs from there. End that process, or give another folder: --state FOLDER.",
            )
    details = f"as process {record.pid}, at {record.address}" if record else "and is just starting"
    fail(
        f"a suite already runs from {state.root} {details}",
        "Use it, or stop it with: bottega stop\nA second suite needs another --state FOLDER and --port.",
    )


def _described(plan: SuitePlan) -> str:
    """Return a plan as text, such as "1 gateway, 2 workers, 1 ControlNet server; miniature, 1 thread a worker"."""
    services = (_counted(count, service.title) for service, count in plan.counts if count)
    threads = plan.settings.threads_of(plan.settings.options["workers"])
    models = " and ".join(model.source for model in plan.settings.models)
    return f"{', '.join(services)}; {models}, {_counted(threads, 'thread')} a worker"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


FIRST_PROMPT = "a big red star on the left on a blue background"
"""An example prompt for the embedded model."""


def run_suite(plan: SuitePlan, state: StateFolder, *, in_background: bool) -> None:
    """Run a suite until a signal drains it, or a second signal ends it at once. Raise DoesNotStart if it fails."""
    from bottega.client.suite.service_process import Supervisor
    from bottega.process.fork_server import fork_server

    # The server is forked before this process starts threads.
    with fork_server() as server, closing(ServiceLog(state.logs, "suite")) as log:
        settings = plan.settings
        listener = TerminalListener(log, quiet=in_background)
        if server is None:
            listener.not_forked("this process has other threads")

        def on_ready(fleet: FleetStatus, seconds: float) -> None:
            for thing in left_out_of(fleet):
                listener.left_out(thing)
            addresses = (settings.address, settings.fleet_address, plan.http_address)
            say_ready(*addresses, seconds, state, command=first_command(settings.models))

        asyncio.run(_run(Supervisor(plan, state, listener, fork_server=server), on_ready))


def first_command(models: tuple[SuiteModel, ...]) -> str:
    """Return a command that draws a first picture with the first one of a suite's models."""
    from bottega.model_files.folder_check import check_model_folder

    model = f" --model {quote(models[0].name)}" if len(models) > 1 else ""
    if check_model_folder(models[0].folder).edits_only:
        return f'bottega edit PICTURE "{FIRST_PROMPT}" --mask MASK -o star.png{model}'
    return f'bottega generate "{FIRST_PROMPT}" -o star.png{model}'


def say_ready(
    address: str, fleet_address: str, http_address: str, seconds: float, state: StateFolder, *, command: str
) -> None:
    """Print that the suite is ready, and how to draw: the address of the page, a command, and the HTTP API."""
    found = state.root == state_folder() or address == f"127.0.0.1:{DEFAULT_PORT}"
    say(f"Ready after {seconds:.1f} s. Draw something:")
    if http_address:
        say(f"  in a browser:      http://{http_address}")
    say(f"  in a terminal:     {'' if found else f'BOTTEGA_ADDRESS={address} '}{command}")
    if http_address:
        say(f"  by OpenAI's API:   http://{http_address}/v1")
    if not found:
        say(f"Commands about its services, such as bottega fleet, also need BOTTEGA_FLEET={fleet_address}.")


async def _run(supervisor: Supervisor, on_ready: Callable[[FleetStatus, float], None]) -> None:
    stop = asyncio.Event()
    began_s = time.monotonic()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal(stop, supervisor))
    await supervisor.run(stop, lambda fleet: on_ready(fleet, time.monotonic() - began_s))


def _on_signal(stop: asyncio.Event, supervisor: Supervisor) -> Callable[[], None]:
    def stop_or_kill() -> None:
        if stop.is_set():
            supervisor.kill_all()
            return
        say()
        say("Stopping; Ctrl-C again does not wait for running jobs.")
        stop.set()

    return stop_or_kill

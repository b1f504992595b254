"""`bottega doctor`: checks this machine (Python, packages, cores, limits, disk), a model and a gateway, with advice."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import click

from bottega.client.addons.addon import CheckResult, Level, fail, ok, warn
from bottega.client.cli.options import address_option, fleet_option, gateway_choice, state_option
from bottega.client.cli.terminal import Styled, say
from bottega.client.instance import StateFolder
from bottega.client.transport.connection import default_fleet_address
from bottega.errors import ConfigError, ServicesMissing
from bottega.manifest import VARIABLE, read_services
from bottega.model_files.control_layout import ControlLayout, read_base_layout
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.folder_check import check_model_folder, folder_of
from bottega.model_files.own_files import own_controlnets
from bottega.model_files.report import ModelReport
from bottega.model_files.single_file import is_single_file
from bottega.model_files.single_file_check import refusal_of
from bottega.process.open_files import ENOUGH, LITTLE

_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}

_OURS = ("bottega-protos", "bottega-libs", "bottega-serving", "bottega-services")
_PYTHON = ((3, 11), (3, 14))
# The logs of a suite take at most 16 MiB a service, but a full disk stops more than the suite.
_LITTLE_MIB, _TOO_LITTLE_MIB = 1024, 128
# Parent of the units' StateDirectory.
_UNITS_STATE = Path("/var/lib")
_TODO = "Workers do not start with this model. Correct it, or check another folder: bottega doctor --model FOLDER"


@click.command("doctor")
@click.option("--model", default="miniature", show_default=True, help="Model: miniature, a folder or a single file.")
@state_option
@address_option
@fleet_option
def command(*, model: str, state: StateFolder, address: str) -> None:
    """Look for problems that keep the suite from running.

    This checks Python, packages, limits, disk, model and gateway. The exit status is 1 if a check fails.
    """
    fleet_address = gateway_choice(click.get_current_context()).fleet_address or default_fleet_address(address)
    levels = set()
    for result in _results(model, state, address, fleet_address):
        levels.add(result.level)
        say(Styled(text=f"{result.level:<4}", colour=_COLOURS[result.level]), f"  {result.what}")
        if result.todo:
            say(f"      {result.todo}")
    raise SystemExit(1 if Level.FAIL in levels else 0)


def _results(model: str, state: StateFolder, address: str, fleet_address: str) -> Iterator[CheckResult]:
    from bottega.client.checkup.gateway import check_gateway

    yield from check_python()
    yield from check_packages(installed_versions(), pinned_versions())
    yield from check_cores(len(os.sched_getaffinity(0)), os.environ.get("OMP_WAIT_POLICY", ""))
    yield from check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from check_disk(state.root.resolve())
    yield from check_unit_disks()
    yield from check_model(model)
    yield from check_own_controlnets(model)
    yield from check_gateway(address, fleet_address)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[CheckResult]:
    """Check the version of Python that runs this command; `bottega up` starts the services with the same Python."""
    text = ".".join(map(str, version))
    if _PYTHON[0] <= version < _PYTHON[1]:
        yield ok(f"Python {text}")
    else:
        yield fail(f"Python {text}", "Install Bottega into a virtual environment of Python 3.11, 3.12 or 3.13.")


def check_packages(installed: Mapping[str, str], pinned: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check that all distributions of Bottega have one version, and other packages the versions tested with it.

    Args:
        installed: Installed versions, by normalised package name.
        pinned: Tested versions, by normalised package name; empty without a constraints.txt.
    """
    yield from _check_ours(installed)
    if "bottega-services" in installed:
        yield from _check_services(installed)
    other = [
        f"{name} {version} instead of {pinned[name]}"
        for name, version in sorted(installed.items())
        if name in pinned and version.partition("+")[0] != pinned[name]
    ]
    if other:
        yield warn(f"untested versions: {', '.join(other)}", "Install again with pip install -c constraints.txt")
    elif pinned:
        yield ok(f"{len(installed.keys() & pinned.keys())} packages have the versions that Bottega was tested with")


def check_cores(cores: int, wait_policy: str) -> Iterator[CheckResult]:
    """Check OMP_WAIT_POLICY, without which torch processes that share cores slow each other down."""
    if wait_policy.upper() not in ("", "PASSIVE"):
        yield warn(
            f"OMP_WAIT_POLICY is {wait_policy}: torch processes that share cores slow each other down, up to 80-fold",
            "export OMP_WAIT_POLICY=PASSIVE",
        )
    yield ok(f"{cores} cores; run torch programs of your own beside a worker with OMP_WAIT_POLICY=PASSIVE, as up does")


def check_disk(folder: Path) -> Iterator[CheckResult]:
    """Check the free space on the disk of the state folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - Path.exists raises where nobody may look
    if not os.access(existing, os.W_OK):
        yield fail(f"the state folder {folder} cannot be written to", "Set another: --state FOLDER or BOTTEGA_STATE.")
        return
    yield _room(existing, f"the state folder {folder}", "Free space, or set another: --state FOLDER or BOTTEGA_STATE.")


def check_unit_disks(parent: Path = _UNITS_STATE) -> Iterator[CheckResult]:
    """Check the free space for the state folders of this machine's systemd units; one result for each disk."""
    disks: dict[int, list[Path]] = {}
    for folder in sorted(parent.glob("bottega-*")):
        disks.setdefault(folder.stat().st_dev, []).append(folder)
    for folders in disks.values():
        yield _room(folders[0], ", ".join(map(str, folders)), "Free space: a gateway takes no jobs on a full disk.")


def check_open_files(hard: int) -> Iterator[CheckResult]:
    """Check the hard limit of open files, up to which every service raises its own limit. Negative means no limit."""
    if 0 <= hard < LITTLE:
        yield warn(
            f"a process may have at most {hard} files and sockets open: services take fewer connections",
            f"Raise it to {ENOUGH}: LimitNOFILE in a unit of systemd, nofile in /etc/security/limits.conf.",
        )
    else:
        yield ok(f"a process may have {'any number of' if hard < 0 else hard} files and sockets open")


def _room(folder: Path, whose: str, todo: str) -> CheckResult:
    """Return a result about the free space on the disk of a folder. `todo` is the advice if there is too little."""
    free_mib = shutil.disk_usage(folder).free / 2**20
    what = f"{free_mib / 1024:.1f} GiB free for {whose}"
    if free_mib < _TOO_LITTLE_MIB:
        return fail(what, todo)
    return warn(what, "Free space before the disk is full.") if free_mib < _LITTLE_MIB else ok(what)


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed packages, by normalised name."""
    return {_normal(found.name): found.version for found in metadata.distributions()}


def pinned_versions(beside: Path = Path(__file__)) -> dict[str, str]:
    """Return the versions in constraints.txt of the source checkout that has the file `beside`; empty without one."""
    for folder in beside.resolve().parents:
        path = folder / "constraints.txt"
        if path.exists():
            lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
            return {_normal(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    return {}


def _check_services(installed: Mapping[str, str]) -> Iterator[CheckResult]:
    try:
        services = read_services()
    except ServicesMissing:
        return  # _check_ours reports this
    except ConfigError as error:
        yield fail(f"the manifest of services cannot be used: {error.message}", f"Correct it, or unset {VARIABLE}.")
        return
    for service in services:
        missing = [name for name in service.requires if name not in installed]
        if missing:
            what = f"no {service.title} can run here: {', '.join(missing)} not installed"
            yield warn(what, f"pip install '{service.install}'")


def _check_ours(installed: Mapping[str, str]) -> Iterator[CheckResult]:
    ours = {name: installed[name] for name in _OURS if name in installed}
    if len(set(ours.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in ours.items())
        yield fail(f"Bottega's parts are of different versions: {listed}", "Install all of them from one release.")
    elif "bottega-services" not in ours:
        yield warn(
            "no service can run here: bottega-services is not installed",
            "pip install 'bottega-services[activations,cache,controlnet,gateway,http,loras,worker]'",
        )
    else:
        yield ok(f"Bottega {ours['bottega-libs']}")


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def check_model(model: str) -> Iterator[CheckResult]:
    """Check a model: a folder, a single file, or an embedded model. Each problem is a result."""
    if is_single_file(model):
        refusal = refusal_of(Path(model))
        yield fail(refusal, _TODO) if refusal else ok(f"model {model}: a single file, which is converted at the start")
        return
    report = check_model_folder(folder_of(model))
    for problem in report.problems:
        yield fail(f"model {model}: {problem}", _TODO)
    if not report.problems:
        yield ok(f"model {model}: {_described(report)}")
    if report.advice:
        yield warn(f"model {model} has no preset", f"{report.advice[0].upper()}{report.advice[1:]}.")


def _described(report: ModelReport) -> str:
    """Return a text such as "SDXL, 64 x 64 pixels; 4 files of weights in F16, 4.3 million parameters, 8.3 MiB"."""
    parts = report.parts.values()
    sizes = Counter[str]()
    for part in parts:
        sizes.update(part.bytes_by_dtype)
    dtypes = " and ".join(dtype for dtype, _ in sizes.most_common() if dtype not in {"I64", "I32"})
    variant = f" (variant {report.variant})" if report.variant else ""
    size, files = report.default_size, sum(len(part.files) for part in parts)
    millions = sum(part.parameters for part in parts) / 1e6
    return (
        f"{report.family_title}, {size} x {size} pixels; {files} files of weights{variant} in {dtypes}, "
        f"{millions:.1f} million parameters, {report.size_bytes / 2**20:.1f} MiB"
    )


_CONTROLNET_TODO = "Requests cannot use this ControlNet. Correct it, or remove it from the model's folder controlnets."


def check_own_controlnets(model: str) -> Iterator[CheckResult]:
    """Check the ControlNets in the folder of a model, given as a folder or by the name of an embedded one."""
    folder = folder_of(model)
    own, base = own_controlnets(folder), _base(folder)
    good = []
    for name, path in own.hosted.items():
        if reason := check_controlnet(name, Path(path), base):
            yield warn(reason, _CONTROLNET_TODO)
        else:
            good.append(name)
    for name, reason in own.left_out.items():
        yield warn(f"controlnets/{name} of {model}: {reason}", _CONTROLNET_TODO)
    if good:
        yield ok(f"{len(good)} ControlNet{'' if len(good) == 1 else 's'} of {model} can be used: {', '.join(good)}")


def _base(folder: Path) -> ControlLayout | None:
    """Return the part of the model's layout that ControlNets must fit; None if its configurations cannot be read."""
    try:
        return read_base_layout(folder)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None

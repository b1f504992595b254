"""`bottega config`: checks configuration files, and shows the values that a service uses. It calls no service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say
from bottega.errors import ConfigError
from bottega.manifest import ServiceSpec, load_object, read_services
from bottega.state_folder import CONFIG_VARIABLE, UNITS_CONFIG_FOLDER

if TYPE_CHECKING:
    from bottega.config_keys import KeyPath


@click.group("config")
def command() -> None:
    """Check configurations, and show the values that services use."""


@command.command("check")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--service", "kind", help="Kind of service; needed unless the path is KIND.yaml or KINDs/NAME.yaml.")
@click.option(
    "--ports/--no-ports",
    default=True,
    envvar="BOTTEGA_CHECK_PORTS",
    show_envvar=True,
    help="Also check whether other processes use their ports now (default).",
)
def check(files: tuple[Path, ...], kind: str | None, ports: bool) -> None:
    """Check whether services would start with these files.

    This checks the keys, and whether the models, tenants, certificates and ports that they name are usable on this
    machine. If you are root and the service's systemd unit is installed, the unit's user must be able to read these
    files, too.
    """
    wrong: list[ConfigError] = []
    for file in files:
        service = _named(kind) if kind else _service_of(file)
        try:
            _check_file(service, file, ports=ports)
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise ConfigError("\n".join(error.message for error in wrong))


def _check_file(service: ServiceSpec, file: Path, *, ports: bool) -> None:
    from bottega.client.checkup.start import check_files, find_used_ports
    from bottega.config import load
    from bottega.config_keys import keys_of, lines_of
    from bottega.rpc.server_config import refused_ports

    config = load(load_object(service.config), file)
    refused = refused_ports(config)
    try:
        check_files(service, config, file)
    except ConfigError as error:
        refused.append(error.message)
    for finding in find_used_ports(service, config, file) if ports else ():
        if finding.certain:
            refused.append(finding.text)
        else:
            note(f"{file}: {finding.text}")
    if refused:
        raise ConfigError("\n  ".join([f"{file} cannot be used:", *refused]))
    count = sum(key.path in lines_of(file) for key in keys_of(config))
    article = "an" if service.title[0] in "aeiou" else "a"
    say(f"{file}: {article} {service.title} can use it; it sets {count} {'key' if count == 1 else 'keys'}")


@command.command("show")
@click.argument("service")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="Configuration file; default: the file of the service's systemd unit, if it exists.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=UNITS_CONFIG_FOLDER,
    show_default=True,
    envvar=CONFIG_VARIABLE,
    help="Folder with the configurations of the systemd units.",
)
def show(service: str, file: Path | None, folder: Path) -> None:
    """Show every key of SERVICE, its value, and where the value comes from.

    Secrets are masked. SERVICE is a kind such as gateway, or a kind and a name such as worker@miniature.
    """
    from bottega.config import load
    from bottega.config_keys import keys_of, lines_of

    kind, _, name = service.partition("@")
    spec = _named(kind)
    if name and spec.count is None:
        fail(f"the {spec.title} has no name, because there is only one", f"bottega config show {kind}", status=2)
    usual = folder / (f"{kind}s/{name}.yaml" if name else f"{kind}.yaml")
    # A named instance needs its file: it does not run with the defaults.
    source = file or (usual if name or usual.exists() else None)
    config = load(load_object(spec.config), source)
    lines = lines_of(source) if source else {}
    table = PlainTable("key", "value", "from", wraps=("value",))
    for key in keys_of(config):
        table.add_row(key.name, _text(key.shown()), _origin(key.path, source, lines))
    print_table(table)


def _origin(path: KeyPath, source: Path | None, lines: dict[KeyPath, int]) -> str:
    line = lines.get(path)
    return f"{source}, line {line}" if line else "default"


def _text(value: object) -> str:
    """Return a value as YAML on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _services() -> dict[str, ServiceSpec]:
    return {service.kind: service for service in read_services() if service.config}


def _named(kind: str) -> ServiceSpec:
    services = _services()
    if kind not in services:
        fail(f"there is no kind of service {kind} with a configuration", f"Kinds: {', '.join(services)}", status=2)
    return services[kind]


def _service_of(file: Path) -> ServiceSpec:
    """Return the service that a file configures, from a path as the units use it: KIND.yaml or KINDs/NAME.yaml."""
    if file.is_dir():
        fail(f"{file} is a folder", f"Give its files: bottega config check {file}/*.yaml {file}/*/*.yaml", status=2)
    folder = file.absolute().parent.name
    found = [service for kind, service in _services().items() if file.stem == kind or folder == f"{kind}s"]
    if not found:
        fail(f"the name of {file} does not tell which service it is for", "Give it with --service KIND.", status=2)
    return found[-1]  # workers/cache.yaml is a worker's

"""`bottega config`: checks configuration files, and shows the values that a service uses. It calls no service.

A check looks whether the service could start on this machine: at its files, its certificates and its ports. If root
runs it and the service's systemd unit is installed, files are checked twice: as root, and as the unit's user. Files
that only a running unit can see, such as its credentials, are not checked.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import click
import psutil

from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say
from bottega.config import KeyPath, keys_of, lines_of, load
from bottega.errors import ConfigError
from bottega.manifest import ServiceSpec, load_object, read_services
from bottega.rpc.address import split
from bottega.rpc.security.private_files import FILES_OF_UNITS
from bottega.rpc.security.tls import TlsConfig, TlsFiles
from bottega.rpc.server_config import HttpServerConfig, ServerConfig, refused_ports
from bottega.state_folder import CONFIG_VARIABLE, UNITS_CONFIG_FOLDER

# A user that owns no files: files that it can read are readable for any user of DynamicUser=.
_NOBODY = 65_534
_UNITS = Path("/etc/systemd/system")
_TLS = "server.tls"
_GIVE_CREDENTIALS = "LoadCredential= gives a unit files that are root's (deploy/README.md, What the units do)"
# Folders with other users' files, which a unit may not see.
_HOMES = ("/home/", "/root/", "/run/user/")
_TEMPORARY = ("/tmp/", "/var/tmp/")


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
    lines = lines_of(file)
    count = sum(key.path in lines for key in keys_of(config))
    article = "an" if service.title.startswith((*"aeiou", "HTTP")) else "a"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFinding:
    """A port in a configuration that cannot be opened now."""

    text: str
    """The finding as a sentence."""
    certain: bool
    """Whether the service would fail to start; False if the service itself may be what listens on the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUser:
    """The user and groups of a systemd unit, and the folders that the unit hides from its processes."""

    unit: str
    user: int
    groups: tuple[int, ...]
    hidden: tuple[str, ...]
    """Folders that the unit's processes do not see, each with a slash at its end."""


def check_files(service: ServiceSpec, config: object, file: Path) -> None:
    """Raise ConfigError if the service could not use the files that its configuration names."""
    check = _file_check(service, config)
    check()
    user = unit_user(service, file)
    if user is None:
        return
    for key in keys_of(config):
        for path in _texts_in(key.value):
            if path.startswith(user.hidden):
                raise ConfigError(f"{key.name}: {path} is in a folder that {user.unit} cannot see; move it elsewhere")
    try:
        with _acting_as(user):
            check()
    except ConfigError as error:
        todo = f"; {_GIVE_CREDENTIALS}" if error.message.startswith(_TLS) else ""
        raise ConfigError(f"as the user of {user.unit}: {error.message}{todo}") from None


def find_used_ports(service: ServiceSpec, config: object, file: Path) -> Iterator[PortFinding]:
    """Yield ports in the configuration that cannot be opened, except for those that this service itself has open."""
    for key in keys_of(config):
        if not key.path[-1].endswith("listen") or not key.value:
            continue
        address = str(key.value)
        host, port = split(address)
        try:
            if port:
                _try_to_bind(host.strip("[]"), port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                yield PortFinding(text=f"{key.name} {address} cannot be opened: {error.strerror}", certain=True)
            elif (finding := _by_whom(f"{key.name} {address}", port, service, file)) is not None:
                yield finding


def unit_user(service: ServiceSpec, file: Path) -> UnitUser | None:
    """Return the user of the systemd unit that uses this file; None without such a unit, or unless root asks.

    For example, /etc/systemd/system has the unit of /etc/bottega/gateway.yaml. A configuration elsewhere is for another
    machine, or for a service that any user starts. Raises ConfigError if the unit's user or a group does not exist.
    """
    folder, name = file.absolute().parent, ""
    if service.count is not None:
        folder, name = folder.parent, file.stem
    unit_file = f"bottega-{service.kind}{'@' if name else ''}.service"
    units = folder.parent / "systemd" / "system"
    if os.geteuid() != 0 or units != _UNITS or not (units / unit_file).is_file():
        return None
    unit = unit_file.replace("@", f"@{name}")
    settings = _settings_of([units / unit_file, *_drop_ins(units, unit_file), *_drop_ins(units, unit)])
    try:
        user = _user_id(settings)
        groups = tuple(grp.getgrnam(group).gr_gid for group in _groups(settings))
    except KeyError as error:
        missing = str(error.args[0]).rpartition(": ")[2]  # Python's message ends with the name
        raise ConfigError(
            f"the user or group {missing} of {unit} does not exist; deploy/install.sh install makes it"
        ) from None
    if user is None:
        return None
    hidden = (*(_HOMES if _last(settings, "ProtectHome") in ("yes", "tmpfs") else ()),)
    if _last(settings, "PrivateTmp") == "yes":
        hidden += _TEMPORARY
    return UnitUser(unit=unit, user=user, groups=groups or (_NOBODY,), hidden=hidden)


def _file_check(service: ServiceSpec, config: object) -> Callable[[], None]:
    """Return a function that checks the files in a configuration. It imports nothing, so any user can run it."""
    named = [getattr(config, field.name) for field in fields(config)]  # type: ignore[arg-type]
    tls = next((value.tls for value in named if isinstance(value, ServerConfig | HttpServerConfig)), TlsConfig())
    paths = [tls.certificate, tls.key, tls.authority]
    own_check = load_object(service.config_check) if service.config_check else None

    def check() -> None:
        if tls.given and not any(path.startswith(FILES_OF_UNITS) for path in paths):
            try:
                TlsFiles(tls)
            except ConfigError as error:
                raise ConfigError(f"{_TLS}: {error.message}") from None
        if own_check is not None:
            own_check(config)

    return check


@contextmanager
def _acting_as(user: UnitUser) -> Iterator[None]:
    """Switch this process to another user's file permissions for the `with` block."""
    group, groups = os.getegid(), os.getgroups()
    os.setgroups(user.groups)
    os.setegid(user.groups[0])
    os.seteuid(user.user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)


def _drop_ins(units: Path, unit: str) -> list[Path]:
    return sorted((units / f"{unit}.d").glob("*.conf"))


def _settings_of(files: list[Path]) -> dict[str, list[str]]:
    """Return the values of each setting in unit files, in order. Settings that span several lines are incomplete."""
    settings: dict[str, list[str]] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith(("#", ";")):
                settings.setdefault(name.strip(), []).append(value.strip())
    return settings


def _last(settings: Mapping[str, list[str]], name: str) -> str:
    return settings.get(name, [""])[-1]


def _user_id(settings: Mapping[str, list[str]]) -> int | None:
    """Return the ID of the user that a unit runs as; None for root. Raise KeyError if the user does not exist."""
    if name := _last(settings, "User"):
        return pwd.getpwnam(name).pw_uid or None
    return _NOBODY if _last(settings, "DynamicUser") == "yes" else None


def _groups(settings: Mapping[str, list[str]]) -> list[str]:
    others: list[str] = []
    for value in settings.get("SupplementaryGroups", []):
        others = [*others, *value.split()] if value else []
    own = _last(settings, "Group")
    return [*([own] if own else []), *others]


def _try_to_bind(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, error.strerror) from None
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)


def _by_whom(what: str, port: int, service: ServiceSpec, file: Path) -> PortFinding | None:
    """Describe which process uses a port; None if it is the service with this configuration."""
    pids = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    for pid in filter(None, pids):
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.Error:
            continue
        named = [Path(words[at + 1]) for at, word in enumerate(words[:-1]) if word == "--config"]
        if service.module in words and any(path.exists() and path.samefile(file) for path in named):
            return None
        program = service.module if service.module in words else " ".join(words[:3])
        return PortFinding(text=f"{what} is in use by process {pid} ({program})", certain=True)
    return PortFinding(text=f"{what} is in use by another user's process, which may be this service", certain=False)

"""`bottega certs`: makes your own certificate authority, and certificates for services, tenants and operators.

These commands only read and write files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bottega.client.cli.options import ListGroup, with_examples
from bottega.client.cli.terminal import PlainTable, fail, note, print_table, say
from bottega.state_folder import operator_folder

if TYPE_CHECKING:
    from bottega.rpc.security.certificates import CertificateFolder

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_DAY_S = 86_400.0
_AUTHORITY_DAYS, _DAYS, _WITHIN_DAYS = 3650, 90, 30
_SOON_DAYS = 14


def _folder_option(command: CommandT) -> CommandT:
    return click.option(
        "--folder",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="BOTTEGA_CERTS",
        show_envvar=True,
        default=lambda: operator_folder() / "certs",
        metavar="FOLDER",
        help="Folder of the authority and the certificates; default: certs in /etc/bottega if you may write"
        " there, else in the state folder.",
    )(command)


def _days_option(default: int) -> Callable[[CommandT], CommandT]:
    return click.option(
        "--days",
        type=click.IntRange(1, 36_500),
        default=default,
        show_default=True,
        help="Days of validity; a certificate ends with its authority at the latest.",
    )


class _CertsGroup(ListGroup):
    default_command = "show"


@click.group("certs", cls=_CertsGroup)
@with_examples("""
    bottega certs init    makes an authority; keep its key offline
    bottega certs issue gateway/main worker/gpu-1 operator/anna
    bottega certs show    lists certificates and when they expire
    bottega certs renew   replaces those that expire within 30 days
""")
def command() -> None:
    """Make certificates for services, tenants and operators.

    A certificate is issued to ROLE/NAME. ROLE is gateway, worker, encode, decode, controlnet, loras, cache,
    activations, scale or http, and NAME the service's name in the fleet; or ROLE is tenant or operator, and NAME the
    tenant's or the person's. A service uses the files that `server.tls` in its configuration names, and loads renewed
    files within a second, without a restart. A client uses those that BOTTEGA_TLS_AUTHORITY, BOTTEGA_TLS_CERTIFICATE
    and BOTTEGA_TLS_KEY name.
    """


@command.command("init")
@_days_option(_AUTHORITY_DAYS)
@_folder_option
def init(*, days: int, folder: Path) -> None:
    """Make a certificate authority.

    Anybody who has its key can make certificates that all services trust.
    """
    made = _certificates(folder)
    if made.has_authority:
        fail(f"{folder} already has a certificate authority", "bottega certs show describes it.")
    made.make_authority(days=days)
    say(f"{made.authority_path}: copy it to all services and clients")
    say(f"{made.authority_key_path}: keep it offline; no service needs it")


@command.command("issue")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_days_option(_DAYS)
@_folder_option
def issue(*, names: Sequence[str], days: int, folder: Path) -> None:
    """Make certificates and their private keys.

    NAME is ROLE/NAME, such as worker/gpu-1.
    """
    from bottega.rpc.security.caller import NAME_RULE, identity_from

    made = _with_authority(folder)
    identities = {name: identity_from(name) for name in names}
    wrong = [name for name, identity in identities.items() if identity is None]
    if wrong:
        fail(f"{', '.join(wrong)}: not of the form ROLE/NAME", f"Roles: {_roles()}. A name has {NAME_RULE}.", status=2)
    for name, identity in identities.items():
        assert identity is not None
        if made.find(identity) is not None:
            fail(f"{name} already has a certificate", f"Replace it: bottega certs renew {name}")
        paths = made.issue(identity, days=days)
        say(f"{name}: {paths.certificate} and {paths.key}")


@command.command("renew")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option(
    "--within",
    "within_days",
    type=click.IntRange(0, 36_500),
    default=_WITHIN_DAYS,
    show_default=True,
    help="Without NAME: renew all certificates that expire within this number of days.",
)
@_days_option(_DAYS)
@_folder_option
def renew(*, names: Sequence[str], within_days: int, days: int, folder: Path) -> None:
    """Replace certificates and their private keys."""
    made = _with_authority(folder)
    found = {str(certificate.identity): certificate for certificate in made.certificates()}
    missing = [name for name in names if name not in found]
    if missing:
        fail(f"there is no certificate of {', '.join(missing)}", f"There are: {', '.join(found) or 'none'}", status=2)
    due = [found[name] for name in names] or [
        certificate for certificate in found.values() if certificate.expires_wall - time.time() <= within_days * _DAY_S
    ]
    for certificate in due:
        made.issue(certificate.identity, days=days)
        say(f"{certificate.identity} renewed for {days} days: {certificate.paths.certificate}")
    if not due:
        note(f"No certificate expires within {within_days} days.")


@command.command("show")
@_folder_option
def show(*, folder: Path) -> None:
    """List the authority and its certificates."""
    made = _with_authority(folder)
    table = PlainTable("who", "expires", "certificate")
    table.add_row("the authority", _left(made.authority_expires_wall), str(made.authority_path))
    for certificate in made.certificates():
        table.add_row(str(certificate.identity), _left(certificate.expires_wall), str(certificate.paths.certificate))
    print_table(table)


def _certificates(folder: Path) -> CertificateFolder:
    from bottega.rpc.security.certificates import CertificateFolder

    return CertificateFolder(folder)


def _with_authority(folder: Path) -> CertificateFolder:
    made = _certificates(folder)
    if not made.has_authority:
        fail(f"there is no authority in {folder}", "Make one with: bottega certs init", status=2)
    return made


def _roles() -> str:
    from bottega.rpc.security.caller import Role

    return ", ".join(role for role in Role if role is not Role.LOCAL)


def _left(expires_wall: float) -> str:
    days = (expires_wall - time.time()) / _DAY_S
    if days < 0:
        return f"EXPIRED {-days:.0f} days ago"
    soon = "  SOON" if days < _SOON_DAYS else ""
    return f"in {days:.0f} days{soon}"

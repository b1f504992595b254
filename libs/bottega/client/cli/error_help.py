"""Messages for users about each kind of error, with advice. Add-ons give advice about their own errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from bottega import errors
from bottega.client.cli.addons import advice_for
from bottega.client.cli.terminal import escaped
from bottega.client.instance import StateFolderUnusable
from bottega.client.suite.plan import PortTaken
from bottega.client.transport.calls import CallTimeout, TlsMismatch
from bottega.client.types.messages import SIZE_LIMIT
from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import GenerationSpec

_TOO_BUSY = "Try again when fewer jobs wait; bottega fleet shows the queue."
_SMALLER_IMAGES = "Make the input images smaller: they are resized anyway. JPEG is smaller than PNG."
# How the names of fields begin: those of the gateway and the SDK, and files on the command line.
_GIVEN_FILES = ("IMAGE", "--alpha", "--box", "--control", "--ellipse", "--mask")
_GENERATION_FIELDS = frozenset({"spec", "lora", *_GIVEN_FILES, *GenerationSpec.DESCRIPTOR.fields_by_name})

# The gateway's listener for services does not answer, or the address is another one of its ports.
_ABOUT_THE_FLEET = (
    "Give its address: --fleet-address HOST:PORT or BOTTEGA_FLEET.\n"
    "By default it is at port 8472, and only the gateway's own machine reaches it."
)
# What to do about errors whose message says what happened. The nearest class of an error counts.
_TODO: Mapping[type[BottegaError], str] = MappingProxyType(
    {
        errors.Unauthenticated: "Ask its operator for a key (bottega tenants add NAME), and set BOTTEGA_API_KEY to it.",
        errors.Forbidden: "bottega certs issue operator/NAME makes one; set BOTTEGA_TLS_CERTIFICATE and _KEY to it.",
        errors.ModelNotFound: "bottega models lists what is served.",
        errors.JobNotFound: "bottega jobs lists the jobs that the gateway remembers.",
        errors.TraceNotFound: "bottega jobs watch ID follows a running job. A gateway keeps the traces of the jobs\n"
        "that ended last, in memory: those from before its last start are gone.",
        errors.ImageNotFound: "bottega generate with the same seed draws the same picture again.",
        errors.JobNotFinished: "bottega jobs watch ID follows it; bottega jobs cancel ID ends it.",
        errors.JobCancelled: "bottega generate starts another job.",
        errors.NotFinite: "Try another seed, a lower guidance scale or another sampler.",
        errors.NoWorker: "bottega fleet shows which services have joined; bottega logs says why a worker is missing.",
        errors.LinksFull: "Try again in a moment; bottega logs shows which service opens so many connections.",
        errors.Draining: "Try again in a moment.",
        errors.WorkerLost: "Try again; if it happens every time, bottega logs -n 50 says why.",
        errors.ReaderStalled: "Try again; this command, or the reader of its output, was suspended for too long.",
        errors.CannotSign: "Its operator has to renew the files in `signing`; the gateway then uses them at once.",
        errors.MethodNotServed: "That service is older than this command (bottega --version), or it is not Bottega.",
        errors.Poisoned: "Do not repeat the request unchanged; bottega logs -n 50 says how its workers ended.",
        errors.DataLoss: "Another try does not help; bottega logs gateway -n 50 says what is damaged.",
        errors.DeadlinePassed: "bottega generate starts another job; --timeout SECONDS gives it more time.",
        errors.FleetFull: "Stop a service that is not needed, or raise max_members in the gateway's configuration.",
        errors.TooLarge: "Ask for a smaller picture or for fewer at once.",
        TlsMismatch: "",
        StateFolderUnusable: "Give another one: --state FOLDER or BOTTEGA_STATE.",
        PortTaken: "bottega doctor says which process uses it. Choose another with: bottega up --port PORT (0: any).",
    }
)

_START_ONE = (
    "Start one: bottega up; on a server with systemd units: systemctl start bottega-gateway\n"
    "If it runs elsewhere: --address HOST:PORT or BOTTEGA_ADDRESS."
)

# Beginnings of causes. SQLite does not distinguish a full disk from other output errors.
_NO_ROOM = ("ENOSPC", "EDQUOT", "EFBIG", "SQLITE_FULL", "SQLITE_IOERR")
_NO_DESCRIPTOR = ("EMFILE", "ENFILE")
_FORBIDDEN = ("EROFS", "EACCES", "EPERM", "SQLITE_READONLY", "SQLITE_PERM")


def explain(error: BottegaError, address: str, *, timeout_advice: str = "") -> tuple[str, str]:
    """Return a description of an error, and advice, which may be empty.

    Args:
        address: host:port of the gateway.
        timeout_advice: Advice if the command's own time-out has passed; empty if the command has none.
    """
    if isinstance(error, errors.DeadlineUnmeetable | CallTimeout):
        return error.message, timeout_advice or _TOO_BUSY
    if error.metadata.get("listener") == "fleet":
        return error.message, _ABOUT_THE_FLEET
    if (advice := advice_for(error)) is not None:
        return error.message, advice
    return _about_the_gateway(error, address)


def _about_the_gateway(error: BottegaError, address: str) -> tuple[str, str]:
    if isinstance(error, errors.TooLarge) and error.metadata.get("limit") == SIZE_LIMIT:
        return error.message, _SMALLER_IMAGES if error.metadata.get("images") != "0" else "Send less at once."
    for kind in type(error).__mro__:
        if kind in _TODO:
            return error.message, _TODO[kind]
    match error:
        case errors.InvalidRequest():
            return _explain_violations(error)
        case errors.ConfigError():
            what, *wrong = error.message.split("\n")
            return what, "\n".join(escaped(line.strip()) for line in wrong)
        case errors.StorageUnavailable():
            return error.message, storage_advice(error, "gateway")
        case errors.Unavailable():
            return f"no gateway answers at {address}", _START_ONE
        case errors.QueueFull():
            return error.message, f"Try again in {error.retry_after_s or 5:.0f} s."
        case errors.InternalError():
            return (
                f"the suite failed: {error.message}",
                "See bottega logs -n 50; bottega doctor looks for causes.",
            )
        case _:
            return error.message, ""


def storage_advice(error: errors.StorageUnavailable, service: str) -> str:
    """Return advice about a service that cannot store data.

    Args:
        service: What the service is called, such as "LoRA store".
    """
    cause = error.metadata.get("cause", "")
    if cause.startswith(_NO_ROOM):
        return f"Free space on the disk of the {service}; it then resumes by itself."
    if cause.startswith(_FORBIDDEN):
        return f"Let the {service} write to its folder; it then resumes by itself."
    if cause.startswith(_NO_DESCRIPTOR):
        return f"The {service} resumes by itself when connections end; bottega doctor says how to allow more."
    return f"Try again in {error.retry_after_s or 1:.0f} s. If that does not help, see bottega logs -n 50."


def exit_status(error: BottegaError) -> int:
    """Return the exit status: 2 if the request was invalid, as for an invalid option, else 1."""
    return 2 if isinstance(error, errors.InvalidRequest | errors.FieldNotServed) else 1


def _explain_violations(error: errors.InvalidRequest) -> tuple[str, str]:
    if not error.violations:
        return error.message, ""
    drawing = any(_head(item.field) in _GENERATION_FIELDS for item in error.violations)
    fields = [escaped(f"{item.field.removeprefix('spec.')}: {item.description}") for item in error.violations]
    return "this cannot be drawn" if drawing else "the request is invalid", "\n".join(fields)


def _head(field: str) -> str:
    return re.split(r"[.\[ ]", field, maxsplit=1)[0]

"""What to do about each kind of error, in a person's words. Knows the error tree, not the commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from bottega import errors
from bottega.client.cli.escaping import plain
from bottega.client.suite.plan import PortTaken
from bottega.client.suite.state import StateFolderUnusable
from bottega.client.transport.retry import CallTimeout
from bottega.client.types.message_size import LIMIT
from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import GenerationSpec

_TOO_BUSY = "Try again when less is waiting: bottega fleet shows what is."
_SMALLER_IMAGES = "Make the input images smaller: they become as large as the picture anyway. JPEG is smaller than PNG."
# Causes of StorageUnavailable, by how they begin. SQLite does not tell an output error on a full disk from others.
_NO_ROOM = ("ENOSPC", "EDQUOT", "EFBIG", "SQLITE_FULL", "SQLITE_IOERR")
_NO_DESCRIPTOR = ("EMFILE", "ENFILE")
_FORBIDDEN = ("EROFS", "EACCES", "EPERM", "SQLITE_READONLY", "SQLITE_PERM")

# As the gateway begins its names of them, the SDK, and --control.
_OF_A_DRAWING = frozenset({"spec", "--control", "lora", *GenerationSpec.DESCRIPTOR.fields_by_name})

# What a LoRA store says of itself: what helps with the gateway's does not help here.
_OF_A_STORE = (errors.StorageUnavailable, errors.DataLoss, errors.TooLarge)

# The gateway's listener for services cannot be reached, or what was asked is another one of its ports.
_ABOUT_THE_FLEET = (
    "Say where it is: --fleet-address HOST:PORT or BOTTEGA_FLEET.\n"
    "Unless it was configured otherwise, only the gateway's own machine reaches it, at port 8472."
)
# By the limit that TooLarge names, where it is none of a picture's.
_NO_PICTURE = {
    "budget_bytes": "Ask for fewer ControlNets at once, or raise engine.budget_bytes of the servers that host them.",
    "controlnets": "Host it on another ControlNet server.",
}

# For those whose message says what happened. The nearest class of an error counts.
_TODO: Mapping[type[BottegaError], str] = MappingProxyType(
    {
        errors.ModelNotFound: "bottega models lists what is served.",
        errors.LoraNotFound: "bottega loras lists those that there are.",
        errors.LoraUnusable: "bottega loras lists which model each is for; bottega models what is served.",
        errors.ControlNetNotFound: "bottega controlnets lists what is served.",
        errors.ControlNetUnusable: "bottega controlnets lists which model each is for; bottega models what is served.",
        errors.ControlNetExists: "Add it under another name; bottega controlnets lists those that are taken.",
        errors.JobNotFound: "bottega jobs lists those that are remembered.",
        errors.ImageNotFound: "bottega generate with the same seed draws the same picture again.",
        errors.JobNotFinished: "bottega jobs watch ID follows it.",
        errors.JobCancelled: "bottega generate begins another one.",
        errors.NotFinite: "Try another seed, a lower guidance scale or another sampler.",
        errors.NoWorker: "bottega fleet shows who has joined; bottega logs says why a worker has not.",
        errors.NoLora: "bottega fleet shows whether a LoRA store has joined; bottega logs loras why one has not.",
        errors.NoControlNet: "bottega controlnets says who hosts what; bottega logs why a server is not there.",
        errors.LinksFull: "Try again in a moment; bottega logs says who asks for so many links.",
        errors.Draining: "Try again in a moment.",
        errors.WorkerLost: "Try again; if it happens every time, bottega logs -n 50 says why.",
        errors.ReaderStalled: "Try again; it was stopped for long, or what reads its output was.",
        errors.MethodNotServed: "That service is older than this command (bottega --version), or no Bottega at all.",
        errors.Poisoned: "Do not try it as it is; bottega logs -n 50 says how its workers ended.",
        errors.DataLoss: "Asking again does not help; bottega logs gateway -n 50 says what is damaged.",
        errors.DeadlinePassed: "bottega generate begins another one; --timeout SECONDS gives it more time.",
        errors.FleetFull: "Stop a service that is not needed, or raise max_members in the gateway's configuration.",
        errors.TooLarge: "Ask for a smaller picture or for fewer at once.",
        StateFolderUnusable: "Name another one: --state FOLDER or BOTTEGA_STATE.",
        PortTaken: "bottega doctor says by whom; another one: bottega up --port PORT (0: any).",
    }
)


def explained(error: BottegaError, address: str, *, when_late: str = "") -> tuple[str, str]:
    """What happened, and what to do (perhaps nothing).

    address: of the gateway that was asked. when_late: what the command advises where its own time was too short; empty
    where nobody can give it more.
    """
    if isinstance(error, errors.DeadlineUnmeetable | CallTimeout):
        return error.message, when_late or _TOO_BUSY
    return _of_a_part(error) or _of_the_gateway(error, address)


def _of_a_part(error: BottegaError) -> tuple[str, str] | None:
    """What helps where the error is about one part of the suite; its metadata says which."""
    if error.metadata.get("listener") == "fleet":
        return error.message, _ABOUT_THE_FLEET
    if error.metadata.get("service") == "loras" and isinstance(error, _OF_A_STORE):
        return error.message, _about_lora_store(error)
    if isinstance(error, errors.DataLoss | errors.NotFinite) and (names := error.metadata.get("loras")):
        return error.message, _about_loras(error, names)
    return None


def _of_the_gateway(error: BottegaError, address: str) -> tuple[str, str]:
    if isinstance(error, errors.TooLarge) and (todo := _about_limit(error)):
        return error.message, todo
    for kind in type(error).__mro__:
        if kind in _TODO:
            return error.message, _TODO[kind]
    match error:
        case errors.InvalidRequest():
            return _refused(error)
        case errors.StorageUnavailable():
            return error.message, _about_storage(error, "gateway")
        case errors.Unavailable():
            return (
                f"no gateway answers at {address}",
                "Start one with: bottega up\nOne that runs elsewhere: --address HOST:PORT or BOTTEGA_ADDRESS.",
            )
        case errors.QueueFull():
            return error.message, f"Try again in {error.retry_after_s or 5:.0f} s."
        case errors.InternalError():
            return (
                f"the suite failed: {error.message}",
                "bottega logs -n 50 says more; bottega doctor looks for causes.",
            )
        case _:
            return error.message, ""


def exit_status(error: BottegaError) -> int:
    """2 when the request was wrong, as for a wrong option; else 1."""
    return 2 if isinstance(error, errors.InvalidRequest | errors.FieldNotServed) else 1


def _about_loras(error: BottegaError, names: str) -> str:
    """Of LoRAs that a job has, and that are damaged or too strong. names: joined by commas; one where it is damaged."""
    if isinstance(error, errors.DataLoss):
        return f"Bring it again as it was, which replaces it: bottega loras add {plain(names)} FILE"
    return "Try scales nearer to 0 (--lora NAME:SCALE), or each LoRA by itself, or none of them."


def _about_lora_store(error: BottegaError) -> str:
    if isinstance(error, errors.StorageUnavailable):
        return _about_storage(error, "LoRA store")
    return "bottega logs loras -n 50 says what is damaged." if isinstance(error, errors.DataLoss) else ""


def _about_limit(error: errors.TooLarge) -> str:
    """Of limits that are none of a picture's; else nothing."""
    limit = error.metadata.get("limit", "")
    if limit == LIMIT:
        return _SMALLER_IMAGES if error.metadata.get("images") != "0" else "Ask for less at once."
    return _NO_PICTURE.get(limit, "")


def _about_storage(error: errors.StorageUnavailable, whose: str) -> str:
    """Only some of its causes are somebody's to remove; the others pass."""
    cause = error.metadata.get("cause", "")
    if cause.startswith(_NO_ROOM):
        return f"Make room on the {whose}'s disk; it goes on by itself then."
    if cause.startswith(_FORBIDDEN):
        return f"Let the {whose} write to its folder; it goes on by itself then."
    if cause.startswith(_NO_DESCRIPTOR):
        return f"The {whose} goes on by itself when connections end; bottega doctor says how to give it room for more."
    again_s = error.retry_after_s or 1
    return f"Try again in {again_s:.0f} s; if it stays so, bottega logs -n 50 says why."


def _refused(error: errors.InvalidRequest) -> tuple[str, str]:
    if not error.violations:
        return error.message, ""
    drawing = any(_head(item.field) in _OF_A_DRAWING for item in error.violations)
    fields = [plain(f"{item.field.removeprefix('spec.')}: {item.description}") for item in error.violations]
    return "this cannot be drawn" if drawing else "this cannot be asked", "\n".join(fields)


def _head(field: str) -> str:
    return re.split(r"[.\[ ]", field, maxsplit=1)[0]

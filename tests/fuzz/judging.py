"""What is wrong with an answer: a status that no request may get, or words that give away what runs inside."""

from __future__ import annotations

import re

import grpc

from bottega.miniature import WEIGHTS
from tests.fuzz.calls import Outcome
from tests.fuzz.case import INVALID, Case
from tests.fuzz.controlnets import ROOT_PREFIX

_S = grpc.StatusCode

_ALWAYS = frozenset({_S.OK, _S.INVALID_ARGUMENT, _S.NOT_FOUND, _S.RESOURCE_EXHAUSTED})
_ALSO = {
    # FAILED_PRECONDITION: a ControlNet that somebody has joined with for another base model.
    # UNAVAILABLE: LoRAs, for which there is no store, or one that does not answer.
    "Generate": {_S.ALREADY_EXISTS, _S.UNIMPLEMENTED, _S.CANCELLED, _S.FAILED_PRECONDITION, _S.UNAVAILABLE},
    "SubmitJob": {_S.ALREADY_EXISTS, _S.UNIMPLEMENTED, _S.FAILED_PRECONDITION, _S.UNAVAILABLE},
    "GetImage": {_S.FAILED_PRECONDITION},
    # UNAVAILABLE: one of that name has just left.
    "Join": {_S.FAILED_PRECONDITION, _S.UNAVAILABLE},
    # UNIMPLEMENTED: the worker runs no ControlNets.
    "RunAttempt": {_S.FAILED_PRECONDITION, _S.CANCELLED, _S.ABORTED, _S.UNIMPLEMENTED, _S.UNAVAILABLE},
    # While it draws.
    "ProfileBlocks": {_S.UNAVAILABLE},
    # ALREADY_EXISTS: the one that is configured.
    "AddControlNet": {_S.FAILED_PRECONDITION, _S.ALREADY_EXISTS},
    # As many offers as may be wait to be taken up, which nobody here does; or the worker has no peer.
    "OpenLink": {_S.UNAVAILABLE},
    # Another LoRA of that name; one that somebody has asked for a moment ago.
    "UploadLora": {_S.ALREADY_EXISTS},
    "RegisterLora": {_S.ALREADY_EXISTS},
    "DeleteLora": {_S.FAILED_PRECONDITION},
}
# The folders themselves; what lies in them is nobody's business.
_ROOTS = re.compile(re.escape(str(WEIGHTS)) + rf"(?:/loras|/controlnets)?(?!/)|/[^\s:]*/{ROOT_PREFIX}\w+(?![/\w])")
_SAFETENSORS = frozenset({"AddControlNet", "UploadLora", "RegisterLora"})
_BELOW_ROOT = frozenset({"AddControlNet", "RegisterLora"})
# What is larger than a service reads, only to refuse it in its own words, gRPC refuses in its own. It says sizes alone.
_UNREAD = re.compile(r"SERVER: Received message larger than max \(\d+ vs\. \d+\)")
# Paths, addresses of hosts and of memory, and what libraries of ours say.
_GIVEN_AWAY = re.compile(
    r"/(?:home|usr|opt|etc|var|tmp|proc|srv|work|root)/|site-packages|\.py\b|0x[0-9a-f]{6,}|\b\d+\.\d+\.\d+\.\d+:\d+"
    r"|Traceback|Exception|Error\b\(|\b(?:PIL|Pillow|protobuf|pydantic|sqlite|torch|safetensors|diffusers|tokenizer|asyncio)\b"
    r"|NoneType|codec can't|object has no|google\.|\bgrpc\b|(?-i:SERVER): |Method not found"
    r"|Concurrent RPC|Locally aborted|Unexpected <|Exception (?:iterating|calling)|RST_STREAM|GOAWAY|Stream removed",
    re.IGNORECASE,
)


def fault(method: str, raw: tuple[bytes, ...], outcome: Outcome) -> str:
    """What is wrong with the answer; empty when nothing is.

    Methods for who runs the server say below which folder, of weights, ControlNets or LoRAs, others are taken.
    What a LoRA or a ControlNet must be to be taken in is a file of safetensors.
    """
    if outcome.code not in _ALWAYS | _ALSO.get(method, set()) and not _own_deadline(method, outcome):
        return f"{outcome.code.name}: {outcome.text[:300]}"
    text = _ROOTS.sub("", outcome.text) if method in _BELOW_ROOT else outcome.text
    if method in _SAFETENSORS:
        text = text.replace("safetensors", "")
    for match in _GIVEN_AWAY.finditer(_UNREAD.sub("", text)):
        # A caller's own words are no secret to it.
        if not any(match.group().encode() in part for part in raw):
            return f"gives away {match.group()!r}: {outcome.text[:300]}"
    return ""


def _own_deadline(method: str, outcome: Outcome) -> bool:
    """Whether the job ended by the deadline that was asked for, as the service says it; one that hangs, by ours."""
    late = outcome.code is _S.DEADLINE_EXCEEDED and outcome.text.startswith("the deadline passed")
    return method == "Generate" and late


def mismatch(case: Case, outcome: Outcome) -> str:
    """How the answer differs from the one that the case must get; empty when it does not."""
    if case.refused_later and outcome.code is INVALID:
        return ""
    if case.if_idle and outcome.code is _S.UNAVAILABLE:
        return ""
    if outcome.code is not case.code:
        return f"{outcome.code.name} instead of {case.code.name}: {outcome.text[:300]}"
    if outcome.fields != case.fields:
        return f"names {sorted(outcome.fields)} instead of {sorted(case.fields)}"
    return ""

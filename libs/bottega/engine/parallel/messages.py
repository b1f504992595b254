"""Messages between the engines of a pair, as tensors over a link.

The leader has the jobs, and the follower computes rows for it. The first tensor of a message has the name of its kind.
The receiver copies a message, checks the copy, and raises ValueError if it breaks a rule. Jobs have numbers.

    leader -> follower    job: conditions, and data of add-ons             ready, or refused; with add-ons, again
                                                                           whenever that changes
                          step: latents and timesteps of rows              noise, or declined
                          leave: a job has ended                           -
    follower -> leader    state: whether it has work of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pydantic
import torch
from pydantic import AfterValidator, Field, TypeAdapter
from torch import Tensor

from bottega import kinds
from bottega.device_links.tensor_messages import DTYPES, TensorMessage, message_of, packed, parts_of, unpacked
from bottega.engine.parallel.remote_rows import OffloadedPart, OffloadedRow, RemoteJob, RemoteRow
from bottega.model.rows import Half, condition_parts, read_conditions
from bottega.transport import Layout, Part

_MAX_NUMBER = 2**53
# Tensors of a step before its samples: the table and the timesteps.
_STEP_HEADERS = 2
# Largest number of add-ons of one job.
_MOST_PARTS = 8
# Number of columns of a row in a step's table, before `active`.
_FACTS = 4
# Times are sent as microseconds.
_PER_S = 1_000_000
# Largest number of rows of one step; the largest batches in use have some tens.
_MOST_ROWS = 512


def _check_kind(text: str) -> str:
    if not kinds.is_kind(text):
        raise ValueError("is not a kind of add-on")
    return text


_Kind = Annotated[str, AfterValidator(_check_kind)]
_Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


class PairMessageKind(StrEnum):
    """The kind of a message."""

    JOB = "job"
    READY = "ready"
    REFUSED = "refused"
    STEP = "step"
    NOISE = "noise"
    DECLINED = "declined"
    LEAVE = "leave"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobHeader:
    number: _Number
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    """Halves of guidance that have conditions, in the order of the tensors."""
    parts: Annotated[tuple[_Kind, ...], Field(max_length=_MOST_PARTS)]
    """Kinds of the add-ons with data in the message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteStep:
    """Rows of one forward pass, with samples [rows, channels, height, width] and timesteps [rows]."""

    number: int
    rows: tuple[RemoteRow, ...]
    samples: Tensor
    timesteps: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteNoise:
    """The response to a step: the predicted noise of its rows."""

    number: int
    places: tuple[int, ...]
    """Indexes of the rows that were computed."""
    noise: Tensor
    """[places, channels, height, width]."""
    waited_s: float = 0.0
    """Seconds of waiting for residuals."""


def job_message(number: int, remote_job: RemoteJob) -> TensorMessage:
    """Return the message that introduces a job to the other worker."""
    header = _JobHeader(number=number, halves=tuple(remote_job.halves), parts=tuple(remote_job.parts))
    parts: dict[str, Tensor] = {}
    for kind, part in remote_job.parts.items():
        parts[f"{kind}."] = packed(part.header)
        parts |= {f"{kind}.{name}": tensor for name, tensor in part.tensors.items()}
    return message_of(
        {
            PairMessageKind.JOB.value: packed(_HEADER.dump_json(header)),
            **condition_parts(list(remote_job.halves.values())),
            **parts,
        }
    )


def read_job(layout: Layout, views: Sequence[Part]) -> tuple[int, RemoteJob]:
    """Parse a job message into the job's number and the job, with copies of the tensors."""
    parts = parts_of(layout, views)
    try:
        header = _HEADER.validate_json(unpacked(parts[PairMessageKind.JOB.value]))
    except pydantic.ValidationError as error:
        raise ValueError(f"a job message's header: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    addon_parts = {kind: _part(kind, parts) for kind in header.parts}
    return header.number, RemoteJob(halves=read_conditions(parts, header.halves), parts=addon_parts)


def step_message(number: int, rows: Sequence[OffloadedRow], remote_jobs: Mapping[RemoteJob, int]) -> TensorMessage:
    """Return a step message. `remote_jobs` maps the rows' jobs to their numbers."""
    parts = max(len(sent.active) for sent in rows)
    table = [[number, *[0] * (_FACTS - 1 + parts)]]
    for sent in rows:
        active = [*sent.active, *[0] * (parts - len(sent.active))]
        table.append([remote_jobs[sent.remote_job], sent.image, sent.row.half.value, sent.row.step, *active])
    return message_of(
        {
            PairMessageKind.STEP.value: torch.tensor(table),
            "timesteps": torch.stack([sent.row.timestep.float() for sent in rows]),
            "samples": torch.stack([sent.row.network_input for sent in rows]),
        },
        headers=_STEP_HEADERS,
    )


def read_step(layout: Layout, views: Sequence[Part]) -> RemoteStep:
    """Parse a step message, with copies of the tensors."""
    parts = parts_of(layout, views, headers=_STEP_HEADERS)
    table, samples, timesteps = parts[PairMessageKind.STEP.value], parts.get("samples"), parts.get("timesteps")
    if table.dtype != torch.int64 or table.dim() != 2 or not 2 <= len(table) <= _MOST_ROWS:
        raise ValueError("a step's table must be int64 [1 + rows, columns]")
    if not _FACTS <= table.shape[1] <= _FACTS + _MOST_PARTS:
        bounds = f"{_FACTS} to {_FACTS + _MOST_PARTS}"
        raise ValueError(f"a step's table must have {bounds} columns; got {table.shape[1]}")
    if samples is None or samples.dim() != 4 or samples.dtype not in DTYPES or len(samples) != len(table) - 1:
        raise ValueError("samples of a step must be [rows, channels, height, width]")
    if timesteps is None or timesteps.dtype != torch.float32 or timesteps.shape != samples.shape[:1]:
        raise ValueError("a step must have one float32 timestep for each row")
    (number, *_), *rows = table.tolist()
    if any(min(row) < 0 or row[2] > 1 for row in rows):
        raise ValueError("a step's table has a number out of range")
    return RemoteStep(
        number=number,
        rows=tuple(
            RemoteRow(remote_job=remote_job, image=image, half=Half(half), step=step, active=tuple(active))
            for remote_job, image, half, step, *active in rows
        ),
        samples=samples.clone(),
        timesteps=timesteps.clone(),
    )


def noise_message(answer: RemoteNoise) -> TensorMessage:
    """Return the message with the predicted noise of a step."""
    table = [answer.number, round(answer.waited_s * _PER_S), *answer.places]
    return message_of({PairMessageKind.NOISE.value: torch.tensor(table), "rows": answer.noise}, headers=1)


def read_noise(layout: Layout, views: Sequence[Part]) -> RemoteNoise:
    """Parse a noise message, with a copy of the tensor."""
    parts = parts_of(layout, views, headers=1)
    table, noise = parts[PairMessageKind.NOISE.value], parts.get("rows")
    if table.dtype != torch.int64 or table.dim() != 1 or noise is None or len(noise) != len(table) - 2:
        raise ValueError("a noise message must have one place for each row")
    number, waited, *places = table.tolist()
    if not 0 <= waited <= _MAX_NUMBER:
        raise ValueError(f"a noise message has a waiting time of {waited} microseconds, which is out of range")
    return RemoteNoise(number=number, places=tuple(places), noise=noise.clone(), waited_s=waited / _PER_S)


def _part(kind: str, parts: Mapping[str, Tensor]) -> OffloadedPart:
    """Return an add-on's data in a job message, with copies of the tensors."""
    own = {name.removeprefix(f"{kind}."): tensor for name, tensor in parts.items() if name.startswith(f"{kind}.")}
    if "" not in own:
        raise ValueError(f"a job message has no data of {kind}")
    header = unpacked(own.pop(""))
    return OffloadedPart(header=header, tensors={name: tensor.clone() for name, tensor in own.items()})


_HEADER = TypeAdapter(_JobHeader)

"""What the engines of a pair say to each other over a link: each message as tensors.

The first tensor of a message has the name of its kind. The receiver checks it here, from a copy, before anything is
done with it; what breaks a rule raises ValueError. Jobs go by number.

    leader -> follower    job: its conditions and control images           ready, or refused: with ControlNets or LoRAs,
                                                                           and again whenever that changes
                          step: latents and timesteps of rows              noise, or declined
                          leave: a job has ended                           -
    follower -> leader    state: whether it has something of its own to do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pydantic
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlHosts, ControlInput, ControlServer
from bottega.diffusion.parallel.offload import OffloadedRow, RemoteJob
from bottega.diffusion.parallel.remote_rows import RemoteRow
from bottega.diffusion.rows import Embeds, Half
from bottega.diffusion.spec import LoraSpec
from bottega.diffusion.tensor_messages import DTYPES, TensorMessage, message_of, packed, parts_of, unpacked
from bottega.transport import Layout

_MAX_NUMBER = 2**53
# The best ones: a follower that finds none of these refuses, and the leader computes the rows itself.
_MOST_SERVERS = 8
_MOST_CONTROLS = 8
_MOST_LORAS = 8
# Times go as microseconds.
_PER_S = 1_000_000
# Of one step; a group of any size that is run has some tens.
_MOST_ROWS = 512
_Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


class PairMessageKind(StrEnum):
    """What a message is."""

    JOB = "job"
    READY = "ready"
    REFUSED = "refused"
    STEP = "step"
    NOISE = "noise"
    DECLINED = "declined"
    LEAVE = "leave"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """A ControlNet of a job, without its image and conditions. See ControlInput.

    Whether its residuals may be stale is not said: a follower always waits for its own, which is exact.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    height: Annotated[int, Field(ge=1, le=1 << 14)]
    width: Annotated[int, Field(ge=1, le=1 << 14)]
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    scale: Annotated[float, Field(allow_inf_nan=False)]
    guess_mode: bool
    digest: Annotated[str, Field(max_length=128)]
    servers: Annotated[tuple[tuple[str, str], ...], Field(max_length=_MOST_SERVERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lora:
    """A LoRA of a job. See LoraSpec; the step at which it goes in is the leader's to say, row by row."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    digest: Annotated[str, Field(max_length=128)]
    scale: Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobHeader:
    """What a job message says beside its tensors. halves: of the conditions, in the tensors' order."""

    number: _Number
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    controls: Annotated[tuple[_Control, ...], Field(max_length=_MOST_CONTROLS)]
    loras: Annotated[tuple[_Lora, ...], Field(max_length=_MOST_LORAS)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteStep:
    """Rows that share a forward. samples: [rows, channels, height, width]; timesteps: [rows]."""

    number: int
    rows: tuple[RemoteRow, ...]
    samples: Tensor
    timesteps: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteNoise:
    """The answer to a step. places: of its rows that were computed; noise: [places, channels, height, width].

    waited_s: for residuals.
    """

    number: int
    places: tuple[int, ...]
    noise: Tensor
    waited_s: float = 0.0


def job_message(number: int, remote_job: RemoteJob) -> TensorMessage:
    """The message that tells the other worker of a job."""
    embeds = list(remote_job.halves.values())
    controls = tuple(
        _Control(
            name=control.name,
            height=control.height,
            width=control.width,
            halves=tuple(control.halves),
            scale=control.scale,
            guess_mode=control.guess_mode,
            digest=control.hosts.digest,
            servers=tuple((server.name, server.address) for server in control.hosts.servers[:_MOST_SERVERS]),
        )
        for control in remote_job.controls
    )
    header = _JobHeader(
        number=number,
        halves=tuple(remote_job.halves),
        controls=controls,
        loras=tuple(_Lora(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in remote_job.loras),
    )
    images = {f"image.{place}": control.image for place, control in enumerate(remote_job.controls)}
    return message_of(
        {
            PairMessageKind.JOB.value: packed(_HEADER.dump_json(header)),
            "prompt": torch.stack([each.prompt for each in embeds]),
            "pooled": torch.stack([each.pooled for each in embeds]),
            "time_ids": torch.stack([each.time_ids for each in embeds]),
            **images,
        }
    )


def read_job(layout: Layout, views: Sequence[memoryview]) -> tuple[int, RemoteJob]:
    """A job's number, and the job; its tensors are copies."""
    parts = parts_of(layout, views)
    try:
        header = _HEADER.validate_json(unpacked(parts[PairMessageKind.JOB.value]))
    except pydantic.ValidationError as error:
        raise ValueError(f"a job message's header: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    halves = _conditions(header, parts)
    return header.number, RemoteJob(
        halves=halves,
        controls=tuple(_control(control, parts, place, halves) for place, control in enumerate(header.controls)),
        loras=tuple(LoraSpec(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in header.loras),
    )


def step_message(number: int, rows: Sequence[OffloadedRow], remote_jobs: Mapping[RemoteJob, int]) -> TensorMessage:
    """A step message. remote_jobs: the numbers of their jobs."""
    table = [[number, 0, 0, 0, 0, 0]]
    for each in rows:
        active = [each.remote_job.handles.index(handle) for handle in each.row.controls]
        mask = sum(1 << place for place in active)
        styled = int(each.row.loras is not None)
        table.append([remote_jobs[each.remote_job], each.image, each.row.half.value, each.row.step, mask, styled])
    return message_of(
        {
            PairMessageKind.STEP.value: torch.tensor(table),
            "timesteps": torch.stack([each.row.timestep.float() for each in rows]),
            "samples": torch.stack([each.row.sample for each in rows]),
        }
    )


def read_step(layout: Layout, views: Sequence[memoryview]) -> RemoteStep:
    """What a step message says; its tensors are copies."""
    parts = parts_of(layout, views)
    table, samples, timesteps = parts[PairMessageKind.STEP.value], parts.get("samples"), parts.get("timesteps")
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 6 or not 2 <= len(table) <= _MOST_ROWS:
        raise ValueError("a step's table is no int64 [1 + rows, 6]")
    if samples is None or samples.dim() != 4 or samples.dtype not in DTYPES or len(samples) != len(table) - 1:
        raise ValueError("a step's samples are not [rows, channels, height, width]")
    if timesteps is None or timesteps.dtype != torch.float32 or timesteps.shape != samples.shape[:1]:
        raise ValueError("a step has not one float32 timestep for each row")
    (number, *_), *rows = table.tolist()
    if any(min(row) < 0 or row[2] > 1 or row[4] >> _MOST_CONTROLS or row[5] > 1 for row in rows):
        raise ValueError("a step's table has a number that is out of its bounds")
    return RemoteStep(
        number=number,
        rows=tuple(
            RemoteRow(
                remote_job=remote_job,
                image=image,
                half=Half(half),
                step=step,
                controls=_places(mask),
                loras=bool(styled),
            )
            for remote_job, image, half, step, mask, styled in rows
        ),
        samples=samples.clone(),
        timesteps=timesteps.clone(),
    )


def noise_message(answer: RemoteNoise) -> TensorMessage:
    """A noise message."""
    table = [answer.number, round(answer.waited_s * _PER_S), *answer.places]
    return message_of({PairMessageKind.NOISE.value: torch.tensor(table), "rows": answer.noise})


def read_noise(layout: Layout, views: Sequence[memoryview]) -> RemoteNoise:
    """What a noise message says; its tensor is a copy."""
    parts = parts_of(layout, views)
    table, noise = parts[PairMessageKind.NOISE.value], parts.get("rows")
    if table.dtype != torch.int64 or table.dim() != 1 or noise is None or len(noise) != len(table) - 2:
        raise ValueError("a noise message has not one number for each row")
    number, waited, *places = table.tolist()
    if not 0 <= waited <= _MAX_NUMBER:
        raise ValueError(f"a noise message says that {waited} microseconds were waited")
    return RemoteNoise(number=number, places=tuple(places), noise=noise.clone(), waited_s=waited / _PER_S)


def _conditions(header: _JobHeader, parts: Mapping[str, Tensor]) -> dict[Half, Embeds]:
    for name, dimensions in (("prompt", 3), ("pooled", 2), ("time_ids", 2)):
        part = parts.get(name)
        if part is None or part.dim() != dimensions or len(part) != len(header.halves) or part.dtype not in DTYPES:
            raise ValueError(f"a job message's {name} is not there for each half")
    prompt, pooled, time_ids = (parts[name].clone() for name in ("prompt", "pooled", "time_ids"))
    return {
        half: Embeds(prompt=prompt[place], pooled=pooled[place], time_ids=time_ids[place])
        for place, half in enumerate(header.halves)
    }


def _control(said: _Control, parts: Mapping[str, Tensor], place: int, halves: Mapping[Half, Embeds]) -> ControlInput:
    image = parts.get(f"image.{place}")
    if image is None or image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3:
        raise ValueError(f"control image {place} is no uint8 [height, width, 3]")
    if not set(said.halves) <= set(halves):
        raise ValueError(f"ControlNet {place} controls a half whose conditions are not there")
    servers = tuple(ControlServer(name=name, address=address) for name, address in said.servers)
    return ControlInput(
        name=said.name,
        image=image.clone(),
        height=said.height,
        width=said.width,
        halves={half: halves[half] for half in said.halves},
        scale=said.scale,
        guess_mode=said.guess_mode,
        hosts=ControlHosts(digest=said.digest, servers=servers),
    )


def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(_MOST_CONTROLS) if mask >> place & 1)


_HEADER = TypeAdapter(_JobHeader)

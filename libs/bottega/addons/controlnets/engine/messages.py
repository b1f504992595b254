"""The messages between a worker's engine and that of a ControlNet server over a tensor connection.

A message is a list of tensors; the first is named after the message's kind. The receiver checks a copy here before it
uses the message, and raises ValueError if it breaks a rule. Sessions are identified by numbers.

worker -> server    open: begins the sessions of one request (a lease)    opened, or refused
                    step: latents and timesteps of rows                   residuals, or refused
                    close: ends a lease                                   no answer

A server may abort a residuals message that it has begun, and then refuses the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

import pydantic
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from bottega.addons.controlnets.engine.provider import (
    ControlInput,
    ControlModes,
    ImageScales,
    LatentScaling,
    check_images,
    check_pixels_or_latent,
)
from bottega.device_links.tensor_messages import (
    DTYPES,
    TensorMessage,
    message_of,
    packed,
    parts_of,
    tensor_of,
    unpacked,
)
from bottega.fair_order import Share
from bottega.model.rows import Half, condition_parts, read_conditions
from bottega.model_files.control_layout import ControlLayout
from bottega.rules import MAX_ADAPTERS
from bottega.transport import DType, Layout, Part, TensorSpec

_MAX_NUMBER = 2**53
# More than any network has blocks.
_MAX_RESIDUALS = 1024
_POINT = "point."
COMPUTED = "computed"
"""Name of the last tensor of streamed residuals."""
# Tensors of a step before its samples: the table and the timesteps.
_STEP_HEADERS = 2


class ControlMessageKind(StrEnum):
    """The kind of a message."""

    OPEN = "open"
    OPENED = "opened"
    STEP = "step"
    RESIDUALS = "residuals"
    REFUSED = "refused"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The parameters of a session, without images and conditions. See ControlInput."""

    number: Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    digest: Annotated[str, Field(max_length=128)]
    """Digest of the requested version of the ControlNet."""
    height: Annotated[int, Field(ge=1, le=1 << 14)]
    width: Annotated[int, Field(ge=1, le=1 << 14)]
    scale: Annotated[float, Field(allow_inf_nan=False)]
    guess_mode: bool
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    images: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] = 1
    """Number of control images."""
    images_of: Annotated[int, Field(ge=0)] | None = None
    """Index of an earlier session in the message whose images this one uses; None if it has its own."""
    modes: ControlModes = ()
    image_scales: ImageScales = ()
    latent_scaling: LatentScaling = None

    def __post_init__(self) -> None:
        check_images(self.images, self.modes, self.image_scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpeningHeader:
    """The header of an open message."""

    lease: Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
    base: ControlLayout
    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    """Which halves of guidance (conditional, unconditional) have conditions in the message, in the order of the
    tensors."""
    sessions: Annotated[tuple[SessionSpec, ...], Field(min_length=1, max_length=64)]
    tenant: Annotated[str, Field(max_length=200)]
    """Tenant of the request."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The tenant's share of the server, relative to other tenants."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """A lease: the sessions of one request with ControlNets of one server, which are opened and closed together."""

    lease: int
    """Number that identifies the lease."""
    base: ControlLayout
    """Layout of the model, which the ControlNets must fit."""
    dtype: torch.dtype
    """Element type of the worker's model."""
    sessions: tuple[SessionSpec, ...]
    controls: tuple[ControlInput, ...]
    """The input of each session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A row to compute in a step: a session, a half of guidance and a latent."""

    session: int
    half: Half
    sample: int
    """Index of the row's latent among the step's samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlStep:
    """A request to a server: rows of one shape whose residuals are needed for one step."""

    number: int
    entries: tuple[StepEntry, ...]
    samples: Tensor
    """Latents, [samples, channels, height, width], or the tokens of latents, [samples, tokens, width]."""
    timesteps: Tensor
    """The timestep of each sample, [samples]."""
    alone: bool = False
    """Whether each session's rows are to be computed in a batch of their own, as in stock Diffusers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a lease could not be opened, or a step not be computed. Only one of `lease` and `step` is set."""

    lease: int | None = None
    step: int | None = None
    error: bytes
    """The error, a JobError as JSON."""


def open_message(opening: Opening) -> TensorMessage:
    """Return an open message. All sessions of a request have the same conditions, for one or both halves."""
    fullest = max(opening.controls, key=lambda control: len(control.halves))
    header = _OpeningHeader(
        lease=opening.lease,
        base=opening.base,
        halves=tuple(fullest.halves),
        sessions=opening.sessions,
        tenant=fullest.share.tenant,
        weight=fullest.share.weight,
    )
    read = opening.base.condition_widths
    embeds = [
        replace(half, added={name: tensor for name, tensor in half.added.items() if name in read})
        for half in fullest.halves.values()
    ]
    parts = {ControlMessageKind.OPEN.value: packed(_HEADER.dump_json(header)), **condition_parts(embeds)}
    for place, (session, control) in enumerate(zip(opening.sessions, opening.controls, strict=True)):
        if session.images_of is None:
            parts |= {f"image.{place}.{index}": image for index, image in enumerate(control.images)}
    return message_of(parts)


def read_opening(layout: Layout, views: Sequence[Part]) -> Opening:
    """Return the content of an open message, with copies of its tensors. Raise ValueError if it breaks a rule."""
    parts = parts_of(layout, views)
    try:
        header = _HEADER.validate_json(unpacked(parts[ControlMessageKind.OPEN.value]))
    except pydantic.ValidationError as error:
        raise ValueError(f"an open message's header: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    except KeyError as error:
        raise ValueError(f"an open message has no {error}") from None
    halves = read_conditions(parts, header.halves)
    found = {name: tensor.shape[-1] for half in halves.values() for name, tensor in half.tensors.items()}
    if found != header.base.condition_widths:
        raise ValueError("the conditions of an open message do not fit its model")
    share = Share(tenant=header.tenant, weight=header.weight)
    controls: list[ControlInput] = []
    for place, session in enumerate(header.sessions):
        if session.images_of is None:
            names = [f"{place}.{index}" for index in range(session.images)]
            received = [
                check_pixels_or_latent(name, parts.get(f"image.{name}"), session.latent_scaling) for name in names
            ]
            images = tuple(image.clone() for image in received)
        elif session.images_of >= place or len(controls[session.images_of].images) != session.images:
            raise ValueError(f"session {session.number} must use the images of an earlier one with as many")
        else:
            images = controls[session.images_of].images
        if session.latent_scaling is not None:
            scale = max(1, header.base.latent_scale)
            shape = header.base.latent_channels, session.height // scale, session.width // scale
            if any(image.shape != shape for image in images):
                raise ValueError(f"the images of session {session.number} are not latents of the shape {shape}")
        if not set(session.halves) <= set(halves):
            raise ValueError(f"session {session.number} controls a half of guidance whose conditions are missing")
        controls.append(
            ControlInput(
                name=session.name,
                images=images,
                modes=session.modes,
                image_scales=session.image_scales,
                height=session.height,
                width=session.width,
                halves={half: halves[half] for half in session.halves},
                scale=session.scale,
                guess_mode=session.guess_mode,
                latent_scaling=session.latent_scaling,
                share=share,
            )
        )
    return Opening(
        lease=header.lease,
        base=header.base,
        dtype=halves[header.halves[0]].prompt.dtype,
        sessions=header.sessions,
        controls=tuple(controls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """Facts about the ControlNet of a session that was opened, which its worker needs."""

    residuals: int
    """Number of its residuals."""
    reads_tokens: bool = False
    """Whether samples are tokens, as the model's transformer embeds latents."""
    singles: int = 0
    """Number of residuals that belong to single blocks. They come last in the list."""


def opened_message(lease: int, sessions: Sequence[OpenedSession]) -> TensorMessage:
    """Return the message that a lease has been opened."""
    facts = [[session.residuals, int(session.reads_tokens)] for session in sessions]
    parts = {ControlMessageKind.OPENED.value: torch.tensor([lease]), "sessions": torch.tensor(facts)}
    # Earlier versions do not know single blocks, and both sides of a link may be updated at different times.
    if any(session.singles for session in sessions):
        parts["singles"] = torch.tensor([session.singles for session in sessions])
    return message_of(parts)


def read_opened(layout: Layout, views: Sequence[Part]) -> tuple[int, tuple[OpenedSession, ...]]:
    """Return the lease and the sessions of an opened message. Raise ValueError if it is malformed."""
    parts = parts_of(layout, views)
    lease, sessions = parts[ControlMessageKind.OPENED.value], parts.get("sessions")
    if lease.dtype != torch.int64 or lease.shape != (1,):
        raise ValueError("an opened message does not begin with a number")
    if sessions is None or sessions.dtype != torch.int64 or sessions.dim() != 2 or sessions.shape[1] != 2:
        raise ValueError("an opened message lacks its sessions, int64 [sessions, 2]")
    single_counts = parts.get("singles", torch.zeros(len(sessions), dtype=torch.int64))
    if single_counts.dtype != torch.int64 or single_counts.shape != sessions.shape[:1]:
        raise ValueError("the singles of an opened message are not int64 [sessions]")
    facts = [(*fact, singles) for fact, singles in zip(sessions.tolist(), single_counts.tolist(), strict=True)]
    if any(
        not 0 < residuals <= _MAX_RESIDUALS or tokens not in (0, 1) or not 0 <= singles <= residuals
        for residuals, tokens, singles in facts
    ):
        raise ValueError(f"an opened session must have 1 to {_MAX_RESIDUALS} residuals")
    return int(lease), tuple(
        OpenedSession(residuals=count, reads_tokens=bool(tokens), singles=singles) for count, tokens, singles in facts
    )


def step_message(step: ControlStep) -> TensorMessage:
    """Return the message that requests the residuals of a step."""
    entries = ([entry.session, entry.half.value, entry.sample] for entry in step.entries)
    table = [[step.number, int(step.alone), 0], *entries]
    return message_of(
        {
            ControlMessageKind.STEP.value: torch.tensor(table),
            "timesteps": step.timesteps.float(),
            "samples": step.samples,
        },
        headers=_STEP_HEADERS,
    )


def read_step(layout: Layout, views: Sequence[Part]) -> ControlStep:
    """Return the content of a step message. Samples and timesteps are not copied."""
    parts = parts_of(layout, views, headers=_STEP_HEADERS)
    table, samples, timesteps = parts[ControlMessageKind.STEP.value], parts.get("samples"), parts.get("timesteps")
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 3 or len(table) < 2:
        raise ValueError("a step's table is not int64 [1 + rows, 3]")
    if samples is None or samples.dim() not in (3, 4) or samples.dtype not in DTYPES:
        raise ValueError("a step's samples are neither [samples, channels, height, width] nor [samples, tokens, width]")
    if timesteps is None or timesteps.dtype != torch.float32 or timesteps.shape != samples.shape[:1]:
        raise ValueError("a step needs one float32 timestep for each sample")
    (number, alone, _), *rows = table.tolist()  # a copy, so that checked values stay as they are
    if any(not 0 <= sample < len(samples) or half not in (0, 1) for _, half, sample in rows):
        raise ValueError("a step's table names a half or a sample that does not exist")
    entries = tuple(StepEntry(session=session, half=Half(half), sample=sample) for session, half, sample in rows)
    if len({(entry.session, entry.half, entry.sample) for entry in entries}) < len(entries):
        raise ValueError("a step asks for the same row twice")
    return ControlStep(number=number, entries=entries, samples=samples, timesteps=timesteps, alone=bool(alone))


@lru_cache(maxsize=256)
def residuals_layout(
    rows: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, *, counts: tuple[int, ...] = ()
) -> Layout:
    """Return the layout of the message that answers a step.

    Its first tensor has the step's number, and 1 if any row was not computed alone (`computes_one_session`), else 0.
    The residuals follow in the order in which the base model needs them, [rows, *shape] each: those of a UNet deepest
    first, those of a transformer from the first on. After those of a transformer, which are sent while it computes,
    come the microseconds between the first and the last one.

    Args:
        rows: Number of rows.
        shapes: Shape of each residual of one row. That of a transformer has two dimensions.
        dtype: Their element type.
        counts: Number of residuals of each row, largest first; empty if all have as many as `shapes`. A residual that
            later rows do not have is [fewer rows, *shape].
    """
    has_tokens = len(shapes[0]) == 2
    points = [
        TensorSpec(
            name=f"{_POINT}{point}",
            dtype=DTYPES[dtype],
            shape=(sum(count > point for count in counts) or rows, *shapes[point]),
        )
        for point in (range(len(shapes)) if has_tokens else reversed(range(len(shapes))))
    ]
    head = TensorSpec(name=ControlMessageKind.RESIDUALS.value, dtype=DType.INT64, shape=(2,))
    tail = [TensorSpec(name=COMPUTED, dtype=DType.INT64, shape=(1,))] if has_tokens else []
    return Layout.of(head, *points, *tail, headers=1)


def point_of(spec: TensorSpec) -> int | None:
    """Return which residual a tensor of `residuals_layout` is; None for its other tensors."""
    return int(spec.name.removeprefix(_POINT)) if spec.name.startswith(_POINT) else None


def read_residuals_head(layout: Layout, part: Part) -> tuple[int, bool]:
    """Return the number of the answered step, and whether any of its rows was not computed alone. Raise ValueError."""
    spec = layout.specs[0]
    if (spec.dtype, spec.shape) != (DType.INT64, (2,)):
        raise ValueError("a residuals message does not begin with two numbers")
    number, shared = tensor_of(spec, part).tolist()
    return number, bool(shared)


def refused_message(refusal: Refusal) -> TensorMessage:
    """Return the message that refuses a lease or a step."""
    lease, step = (-1 if number is None else number for number in (refusal.lease, refusal.step))
    return message_of({ControlMessageKind.REFUSED.value: torch.tensor([lease, step]), "error": packed(refusal.error)})


def read_refusal(layout: Layout, views: Sequence[Part]) -> Refusal:
    """Return the content of a refused message."""
    parts = parts_of(layout, views)
    numbers, error = parts[ControlMessageKind.REFUSED.value], parts.get("error")
    if numbers.dtype != torch.int64 or numbers.shape != (2,) or error is None:
        raise ValueError("a refused message lacks the refused item or the reason")
    lease, step = (None if number < 0 else number for number in numbers.tolist())
    return Refusal(lease=lease, step=step, error=unpacked(error))


_HEADER = TypeAdapter(_OpeningHeader)

"""Messages between a worker that lacks a stage and a worker that computes only this stage, as tensors over a link.

The first tensor of a message has the name of its kind, and contains JSON. The receiver copies a message, checks the
copy, and raises ValueError if it breaks a rule. Requests have numbers.

    worker -> stage worker    encode: prompts of a job             conditions, or refused
                              decode: a finished latent            pixels, or refused
                              cancel: no answer is needed          -

The stage worker sends `begun` when it begins to compute a request, so that the worker knows which one it computed if it
dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import pydantic
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from bottega import rules
from bottega.device_links.tensor_messages import DTYPES, TensorMessage, message_of, packed, parts_of
from bottega.engine.encode import Conditions, all_finite
from bottega.engine.events import CutText
from bottega.engine.spec import ResolvedSpec
from bottega.errors import BottegaError
from bottega.fair_order import Share
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, condition_parts, read_conditions
from bottega.model.vae import DecodedAs
from bottega.rpc.status import from_job_error, job_error_from_json, job_error_to_json
from bottega.transport import Layout, Part

_MAX_NUMBER = 2**53
_MAX_TENANT_CHARACTERS = 256
# A request's text has at most 4 MiB.
_MAX_HEADER_BYTES = 8 << 20
_SUMMARY, _IMAGE = "summary", "image"


class StageMessageKind(StrEnum):
    """The kind of a message."""

    ENCODE = "encode"
    CONDITIONS = "conditions"
    DECODE = "decode"
    PIXELS = "pixels"
    CANCEL = "cancel"
    BEGUN = "begun"
    REFUSED = "refused"


_Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Index = Annotated[int, Field(ge=0, lt=rules.MAX_IMAGES)]
_Side = Annotated[int, Field(ge=1, le=rules.MAX_SIDE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The tenant of a job, and its weight. See `Share`."""

    tenant: Annotated[str, Field(max_length=_MAX_TENANT_CHARACTERS)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """The part of a spec that its conditions depend on. See `ResolvedSpec`."""

    number: _Number
    share: _Share
    prompt: str
    prompts: Annotated[tuple[str, ...], Field(max_length=rules.MAX_IMAGES)]
    prompt_2: str | None
    negative_prompt: str | None
    negative_prompt_2: str | None
    weighted: bool
    clip_skip: Annotated[int, Field(ge=0, le=rules.MAX_CLIP_SKIP)] | None
    max_sequence_length: Annotated[int, Field(ge=1, le=rules.MAX_SEQUENCE_LENGTH)] | None
    guidance_scale: Annotated[float, Field(allow_inf_nan=False)]
    width: _Side
    height: _Side
    num_images: Annotated[int, Field(ge=1, le=rules.MAX_IMAGES)]
    true_cfg_scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0

    def spec(self, model: Model) -> ResolvedSpec:
        """Return a spec with this part."""
        facts = {name: getattr(self, name) for name in _OF_SPEC}
        return ResolvedSpec(**facts, sampler=model.defaults.sampler)


_OF_SPEC = tuple(name for name in EncodeRequest.__dataclass_fields__ if name not in {"number", "share"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """The halves that the conditions of one prompt have, and the text that was cut from it."""

    halves: Annotated[tuple[Half, ...], Field(min_length=1, max_length=2)]
    truncations: tuple[CutText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConditionsHeader:
    number: _Number
    seconds: _Seconds
    encoded: Annotated[tuple[_Encoded, ...], Field(min_length=1, max_length=rules.MAX_IMAGES)]
    """For each different prompt."""
    images: Annotated[tuple[_Index, ...], Field(min_length=1, max_length=rules.MAX_IMAGES)]
    """For each image, the place of its prompt in `encoded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NumberHeader:
    number: _Number


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeHeader:
    number: _Number
    share: _Share


@dataclass(frozen=True, slots=True, kw_only=True)
class _PixelsHeader:
    number: _Number
    seconds: _Seconds
    how: DecodedAs
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _RefusedHeader:
    number: _Number
    error: str
    """A JobError as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompt:
    """The conditions of a prompt, on the host. See `Conditions`."""

    halves: Mapping[Half, Embeds]
    summary: Tensor
    truncations: Sequence[CutText]

    def conditions(self, model: Model) -> Conditions:
        """Return the conditions on the model's device. Only the engine's thread may call it."""
        to_device = model.runtime.to_device
        found = {half: embeds.map(to_device) for half, embeds in self.halves.items()}
        return Conditions(
            conditional=found[Half.CONDITIONAL],
            unconditional=found.get(Half.UNCONDITIONAL),
            summary=to_device(self.summary),
            truncations=self.truncations,
            finite=all_finite(model, *(tensor for embeds in found.values() for tensor in embeds.tensors.values())),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedPrompts:
    """The answer of a stage worker to a request to encode prompts."""

    number: int
    seconds: float
    images: Sequence[EncodedPrompt]
    """For each image; images with the same prompt share them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """A finished latent that a stage worker decodes."""

    number: int
    share: _Share
    latent: Tensor
    """[1, channels, height, width], on the host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedPixels:
    """The answer of a stage worker to a request to decode."""

    number: int
    seconds: float
    how: DecodedAs
    finite: bool
    """Whether the VAE's output has neither NaN nor infinity."""
    pixels: Tensor
    """uint8 [height, width, 3], on the host."""


HeaderT = TypeVar("HeaderT")
_ENCODE, _CONDITIONS, _PIXELS = TypeAdapter(EncodeRequest), TypeAdapter(_ConditionsHeader), TypeAdapter(_PixelsHeader)
_NUMBER, _REFUSED, _DECODE = TypeAdapter(_NumberHeader), TypeAdapter(_RefusedHeader), TypeAdapter(_DecodeHeader)


def encode_message(number: int, spec: ResolvedSpec, share: Share) -> TensorMessage:
    """Return the request to encode the prompts of a spec."""
    facts = {name: getattr(spec, name) for name in _OF_SPEC}
    request = EncodeRequest(number=number, share=_share(share), **facts)
    return _message(StageMessageKind.ENCODE, _ENCODE.dump_json(request))


def read_encode(layout: Layout, parts: Sequence[Part]) -> EncodeRequest:
    """Parse a request to encode prompts."""
    request, _ = _read(_ENCODE, StageMessageKind.ENCODE, layout, parts)
    if request.prompts and len(request.prompts) != request.num_images:
        raise ValueError("a request must have a prompt for each image, or one for all")
    return request


def conditions_message(number: int, conditions: Sequence[Conditions], *, seconds: float) -> TensorMessage:
    """Return the answer to a request to encode prompts.

    Args:
        conditions: Conditions of each image.
        seconds: Seconds that it took.
    """
    distinct = list({id(single): single for single in conditions}.values())
    places = {id(single): place for place, single in enumerate(distinct)}
    header = _ConditionsHeader(
        number=number,
        seconds=seconds,
        encoded=tuple(
            _Encoded(halves=tuple(_halves(single)), truncations=tuple(single.truncations)) for single in distinct
        ),
        images=tuple(places[id(single)] for single in conditions),
    )
    tensors: dict[str, Tensor] = {}
    for place, single in enumerate(distinct):
        named = {**condition_parts(list(_halves(single).values())), _SUMMARY: single.summary}
        tensors |= {f"{place}.{name}": tensor for name, tensor in named.items()}
    return _message(StageMessageKind.CONDITIONS, _CONDITIONS.dump_json(header), tensors)


def read_conditions_answer(layout: Layout, parts: Sequence[Part]) -> EncodedPrompts:
    """Parse an answer with conditions, which are copied to the host."""
    header, tensors = _read(_CONDITIONS, StageMessageKind.CONDITIONS, layout, parts)
    prompts = []
    for place, encoded in enumerate(header.encoded):
        prefix = f"{place}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        summary = own.get(_SUMMARY)
        if Half.CONDITIONAL not in encoded.halves or len(set(encoded.halves)) < len(encoded.halves):
            raise ValueError("conditions must have the conditional half, and each half once")
        if summary is None or summary.dim() != 1 or summary.dtype not in DTYPES:
            raise ValueError("conditions must have a summary of one dimension")
        prompts.append(
            EncodedPrompt(
                halves=read_conditions(own, encoded.halves), summary=summary.clone(), truncations=encoded.truncations
            )
        )
    if any(place >= len(prompts) for place in header.images):
        raise ValueError("conditions must have a prompt for each image")
    images = tuple(prompts[place] for place in header.images)
    return EncodedPrompts(number=header.number, seconds=header.seconds, images=images)


def decode_message(number: int, latent: Tensor, share: Share) -> TensorMessage:
    """Return the request to decode a latent [1, channels, height, width] of the backbone."""
    header = _DecodeHeader(number=number, share=_share(share))
    return _message(StageMessageKind.DECODE, _DECODE.dump_json(header), {"latent": latent})


def read_decode(layout: Layout, parts: Sequence[Part], model: Model) -> DecodeRequest:
    """Parse a request to decode, of which the latent is copied to the host."""
    header, tensors = _read(_DECODE, StageMessageKind.DECODE, layout, parts)
    latent = tensors.get("latent")
    if latent is None or latent.dtype != model.latent_dtype or latent.dim() != 4:
        raise ValueError("a request to decode must have a latent of four dimensions in the model's element type")
    count, channels, height, width = latent.shape
    if (count, channels) != (1, model.latent_channels) or height < 1 or width < 1:
        raise ValueError(f"a latent must have the shape [1, {model.latent_channels}, height, width]")
    return DecodeRequest(number=header.number, share=header.share, latent=latent.cpu().clone())


def pixels_message(decoded: DecodedPixels) -> TensorMessage:
    """Return the answer to a request to decode."""
    header = _PixelsHeader(number=decoded.number, seconds=decoded.seconds, how=decoded.how, finite=decoded.finite)
    return _message(StageMessageKind.PIXELS, _PIXELS.dump_json(header), {_IMAGE: decoded.pixels})


def read_pixels(layout: Layout, parts: Sequence[Part]) -> DecodedPixels:
    """Parse an answer with pixels, which are copied to the host."""
    header, tensors = _read(_PIXELS, StageMessageKind.PIXELS, layout, parts)
    pixels = tensors.get(_IMAGE)
    if pixels is None or pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[2] != 3:
        raise ValueError("pixels must be uint8 [height, width, 3]")
    return DecodedPixels(
        number=header.number,
        seconds=header.seconds,
        how=header.how,
        finite=header.finite,
        pixels=pixels.cpu().clone(),
    )


def cancel_message(number: int) -> TensorMessage:
    """Return the message that withdraws a request."""
    return _message(StageMessageKind.CANCEL, _NUMBER.dump_json(_NumberHeader(number=number)))


def read_cancel(layout: Layout, parts: Sequence[Part]) -> int:
    """Parse a cancel message into the number of the request."""
    return _read(_NUMBER, StageMessageKind.CANCEL, layout, parts)[0].number


def begun_message(number: int) -> TensorMessage:
    """Return the message that the computation of a request begins."""
    return _message(StageMessageKind.BEGUN, _NUMBER.dump_json(_NumberHeader(number=number)))


def read_begun(layout: Layout, parts: Sequence[Part]) -> int:
    """Parse the message that the computation of a request begins into the number of the request."""
    return _read(_NUMBER, StageMessageKind.BEGUN, layout, parts)[0].number


def refused_message(number: int, error: BottegaError) -> TensorMessage:
    """Return the answer that a request cannot be served."""
    header = _RefusedHeader(number=number, error=job_error_to_json(error).decode())
    return _message(StageMessageKind.REFUSED, _REFUSED.dump_json(header))


def read_refused(layout: Layout, parts: Sequence[Part]) -> tuple[int, BottegaError]:
    """Parse a refusal into the number of the request and the error."""
    header, _ = _read(_REFUSED, StageMessageKind.REFUSED, layout, parts)
    return header.number, from_job_error(job_error_from_json(header.error.encode()))


def _share(share: Share) -> _Share:
    return _Share(tenant=share.tenant, weight=share.weight)


def _halves(conditions: Conditions) -> dict[Half, Embeds]:
    halves = {Half.CONDITIONAL: conditions.conditional}
    return halves if conditions.unconditional is None else {**halves, Half.UNCONDITIONAL: conditions.unconditional}


def _message(kind: StageMessageKind, header: bytes, tensors: Mapping[str, Tensor] | None = None) -> TensorMessage:
    return message_of({kind.value: packed(header), **(tensors or {})})


def _read(
    adapter: TypeAdapter[HeaderT], kind: StageMessageKind, layout: Layout, parts: Sequence[Part]
) -> tuple[HeaderT, dict[str, Tensor]]:
    """Return the header of a message, and its tensors by name, which are not copied."""
    tensors = parts_of(layout, parts)
    header = tensors.pop(kind.value)
    if header.dtype != torch.uint8 or header.dim() != 1 or len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"the header of a {kind} message is malformed, or longer than {_MAX_HEADER_BYTES} bytes")
    try:
        return adapter.validate_json(header.numpy().tobytes()), tensors
    except pydantic.ValidationError as error:
        raise ValueError(f"the header of a {kind} message breaks a rule: {error.errors()[0]['msg']}") from None

"""Checkpoints: the state of a job between two steps, from which another engine can continue, in safetensors format.

This module does not know when checkpoints are made or where they are stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bottega import rules
from bottega.device.device import Device, HostCopy
from bottega.engine.events import Decisions
from bottega.engine.latent_step import RequestState
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.samplers import SamplerState

VERSION = 10

# Additional tensors of an edit; see `RequestState`.
_OF_EDITS = ("image_latent", "noise", "image")
# Tensors that models need if they do not read the mask, and that Flux Fill needs: later edits may continue with them
# outside the mask.
_OF_SOURCE = ("image_latent", "noise")
_SAMPLER, _STEP_CACHE = "sampler.", "step_cache."

# Left to the header within the bound of a checkpoint; decisions have a few KiB.
_HEADER_BYTES = 256 << 10

_HEADER = "bottega"
_DIGEST = "digest"
_SHARED = "shared_in_half_precision"
_AS_STOCK = "denoised_as_stock"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedJob:
    """The state of a job that another engine needs to continue it, besides its spec."""

    images: Sequence[RequestState]
    """States of its images, in order."""
    decisions: Decisions = field(default_factory=dict)
    shared_in_half_precision: bool = False
    """See `EngineJob.shared_in_half_precision`."""
    denoised_as_stock: bool = True
    """See `EngineJob.denoised_as_stock`."""


class JobCopy:
    """A copy of a job's state that is being transferred to the host.

    Later steps make new tensors and do not change it. Step caches are left out if the checkpoint would exceed
    `rules.MAX_CHECKPOINT_BYTES` with them: a job that is resumed from it then computes its first step in full.
    """

    def __init__(self, device: Device, job: SavedJob) -> None:
        size_bytes = sum(tensor.nbytes for state in job.images for _, tensor in _tensors(state))
        if size_bytes > rules.MAX_CHECKPOINT_BYTES - _HEADER_BYTES:
            job = dataclasses.replace(job, images=[dataclasses.replace(each, step_caches={}) for each in job.images])
        self._job = job
        self._copies = [{name: device.to_host(tensor) for name, tensor in _tensors(state)} for state in job.images]

    @property
    def ready(self) -> bool:
        """Whether all tensors have arrived on the host. Never waits."""
        return all(copy.ready for copies in self._copies for copy in copies.values())

    def take(self) -> SavedJob:
        """Return the state with its tensors on the CPU. Wait if they have not arrived."""
        images = [_arrived(state, copies) for state, copies in zip(self._job.images, self._copies, strict=True)]
        return dataclasses.replace(self._job, images=images)


class CheckpointMismatch(ValueError):
    """The checkpoint is damaged, or of another model, job or format version."""


def write_checkpoint(model: Model, spec: ResolvedSpec, job: SavedJob) -> bytes:
    """Serialize the state of a job, whose tensors are on the CPU."""
    tensors: dict[str, Tensor] = {}
    images: list[dict[str, object]] = []
    for index, state in enumerate(job.images):
        tensors |= {f"{index}.{name}": tensor for name, tensor in _tensors(state)}
        images.append({"evaluation": state.evaluation, "sampler": state.sampler.numbers})
    # LoRAs are identified by content and step, not by how they were applied.
    loras = [{"name": lora.name, "digest": lora.digest, "scale": lora.scale} for lora in spec.loras]
    decisions = {kind: decision.hex() for kind, decision in job.decisions.items()}
    header = _identity(model, spec) | {"images": images, "loras": loras, "decisions": decisions}
    header[_SHARED], header[_AS_STOCK] = job.shared_in_half_precision, job.denoised_as_stock
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    header[_DIGEST] = _digest(header, whole)
    return safetensors.torch.save(whole, metadata={_HEADER: json.dumps(header)})


def read_checkpoint(data: bytes, model: Model, spec: ResolvedSpec) -> SavedJob:
    """Deserialize the state of a job, with its tensors on the CPU.

    Raises:
        CheckpointMismatch: It is damaged, or of another model, data type or spec.
    """
    header = _header(data)
    for name, value in _identity(model, spec).items():
        if header.get(name) != value:
            raise CheckpointMismatch(f"its {name} is {header.get(name)!r}, not {value!r}")
    try:
        tensors = safetensors.torch.load(data)
        if header.pop(_DIGEST) != _digest(header, tensors):
            raise CheckpointMismatch("it is damaged")
        states = [_state(index, image, tensors) for index, image in enumerate(header["images"])]
        decisions = {kind: bytes.fromhex(decision) for kind, decision in header["decisions"].items()}
        shared, as_stock = bool(header[_SHARED]), bool(header[_AS_STOCK])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointMismatch(f"it is damaged: {type(error).__name__}") from error
    for state in states:
        _check(state, model, spec)
    if len(states) != spec.num_images:
        raise CheckpointMismatch(f"the checkpoint has {len(states)} images, not {spec.num_images}")
    return SavedJob(images=states, decisions=decisions, shared_in_half_precision=shared, denoised_as_stock=as_stock)


def _tensors(state: RequestState) -> Iterator[tuple[str, Tensor]]:
    yield "latent", state.latent
    yield "generator", state.generator
    for name in _OF_EDITS:
        if (tensor := getattr(state, name)) is not None:
            yield name, tensor
    for name, tensor in state.sampler.tensors.items():
        yield f"{_SAMPLER}{name}", tensor
    for name, tensor in state.step_caches.items():
        yield f"{_STEP_CACHE}{name}", tensor


def _arrived(state: RequestState, copies: Mapping[str, HostCopy]) -> RequestState:
    """Return the state with the copies on the host in place of its tensors."""
    tensors = {name: copy.take() for name, copy in copies.items()}
    return RequestState(
        evaluation=state.evaluation,
        latent=tensors["latent"],
        generator=tensors["generator"],
        sampler=SamplerState(tensors=_under(_SAMPLER, tensors), numbers=state.sampler.numbers),
        step_caches=_under(_STEP_CACHE, tensors),
        **{name: tensors.get(name) for name in _OF_EDITS},
    )


def _identity(model: Model, spec: ResolvedSpec) -> dict[str, Any]:
    values = dataclasses.asdict(spec) | {"sampler": spec.sampler.name}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return {"version": VERSION, "model_hash": model.digest, "dtype": model.dtype_name, "spec": digest}


def _digest(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Return the digest of header and tensors, because safetensors has no checksums."""
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _header(data: bytes) -> dict[str, Any]:
    # safetensors reads metadata only from files on disk. Its header is a length and as many bytes of JSON.
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    except (ValueError, KeyError, TypeError):
        raise CheckpointMismatch("it is not a checkpoint") from None
    if not isinstance(header, dict):
        raise CheckpointMismatch("it is not a checkpoint")
    return header


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _state(index: int, image: dict[str, Any], tensors: dict[str, Tensor]) -> RequestState:
    numbers = {str(name): int(value) for name, value in image["sampler"].items()}
    return RequestState(
        evaluation=int(image["evaluation"]),
        latent=tensors[f"{index}.latent"],
        generator=tensors[f"{index}.generator"],
        sampler=SamplerState(tensors=_under(f"{index}.{_SAMPLER}", tensors), numbers=numbers),
        step_caches=_under(f"{index}.{_STEP_CACHE}", tensors),
        **{name: tensors.get(f"{index}.{name}") for name in _OF_EDITS},
    )


def _check(state: RequestState, model: Model, spec: ResolvedSpec) -> None:
    shape = (1, model.latent_channels, spec.height // model.latent_scale, spec.width // model.latent_scale)
    if tuple(state.latent.shape) != shape or not torch.isfinite(state.latent).all():
        raise CheckpointMismatch("its latent has another shape or data type")
    shapes: dict[str, tuple[int, ...]] = {"image": shape[1:]} if model.image_channels else {}
    if not model.image_channels or model.mask_channels > 1:
        shapes |= dict.fromkeys(_OF_SOURCE, shape)
    for name in _OF_EDITS:
        tensor = getattr(state, name)
        if (tensor is None) != (spec.edit is None or name not in shapes):
            raise CheckpointMismatch("its tensors of an edit are missing or unexpected")
        if tensor is not None and (tuple(tensor.shape) != shapes[name] or not torch.isfinite(tensor).all()):
            raise CheckpointMismatch("its image latent or its noise has another shape or data type")
    if any(tensor.dim() != 2 or not torch.isfinite(tensor).all() for tensor in state.step_caches.values()):
        raise CheckpointMismatch("its residuals of steps have another shape, or are not finite")
    pace = model.samplers.pace(spec.sampler)
    first, last = pace.per_step * spec.begin_step, pace.evaluations(spec.num_inference_steps)
    if not first <= state.evaluation <= last:
        raise CheckpointMismatch(f"its evaluation {state.evaluation} is not between {first} and {last}")
    if state.generator.dtype != torch.uint8 or state.generator.shape != torch.Generator("cpu").get_state().shape:
        raise CheckpointMismatch("its state of the random generator is not valid")

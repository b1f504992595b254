"""LoRAs of rows that a second worker computes: the message that names them, and their use in that worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter

from bottega.engine.parallel.offload import OffloadedPart
from bottega.engine.spec import LoraSpec
from bottega.model.rows import Row

if TYPE_CHECKING:
    from bottega.addons.loras.engine.addon import JobLoras


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lora:
    """A LoRA of a job in the message, see LoraSpec. The first worker decides row by row from which step it is used."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    digest: Annotated[str, Field(max_length=128)]
    scale: Annotated[float, Field(allow_inf_nan=False)]


_LORAS = TypeAdapter(Annotated[tuple[_Lora, ...], Field(min_length=1, max_length=8)])


class RemoteLoras:
    """A RemoteAddOn: the LoRAs of another worker's job, which this worker has fetched itself."""

    def __init__(self, loras: JobLoras) -> None:
        self._loras = loras

    def ready(self, now_s: float) -> bool:
        self._loras.update(now_s)
        return not self._loras.waiting

    def activate(self, row: Row, active: int) -> Row:
        if active > 1 or (active and self._loras.loras is None):
            raise ValueError("a row has LoRAs that have not arrived")
        return replace(row, loras=self._loras.loras) if active else row

    def close(self) -> None:
        self._loras.close()


def loras_part(specs: Sequence[LoraSpec]) -> OffloadedPart:
    """Return the message about these LoRAs for the second worker."""
    messages = tuple(_Lora(name=spec.name, digest=spec.digest, scale=spec.scale) for spec in specs)
    return OffloadedPart(header=_LORAS.dump_json(messages))


def read_loras(part: OffloadedPart) -> tuple[LoraSpec, ...]:
    """Return the LoRAs in a message. Raise ValueError if it breaks a rule."""
    messages = _LORAS.validate_json(part.header)
    return tuple(LoraSpec(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in messages)

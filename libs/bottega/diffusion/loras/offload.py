"""The LoRAs of a job whose rows the other worker of a pair computes: what it is told, and how it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from pydantic import Field, TypeAdapter

from bottega.diffusion.parallel.offload import OffloadedPart
from bottega.diffusion.rows import LoraSet, Row
from bottega.diffusion.spec import LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lora:
    """A LoRA of a job. See LoraSpec; the step at which it goes in is the leader's to say, row by row."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    digest: Annotated[str, Field(max_length=128)]
    scale: Annotated[float, Field(allow_inf_nan=False)]


_LORAS = TypeAdapter(Annotated[tuple[_Lora, ...], Field(min_length=1, max_length=8)])


class FetchedLoras(Protocol):
    """LoRAs that were asked for. loras: all of them, once they are here."""

    loras: LoraSet | None

    @property
    def waiting(self) -> bool:
        """Whether some are still to come."""
        ...

    def update(self, now_s: float) -> None:
        """Takes in what has come. Raises the BottegaError for which they never will be here."""
        ...

    def close(self) -> None:
        """Nobody needs them any more."""
        ...


class RemoteLoras:
    """A RemoteAddOn: the LoRAs of a job of the other worker."""

    def __init__(self, loras: FetchedLoras) -> None:
        self._loras = loras

    def ready(self, now_s: float) -> bool:
        self._loras.update(now_s)
        return not self._loras.waiting

    def activate(self, row: Row, active: int) -> Row:
        if active > 1 or (active and self._loras.loras is None):
            raise ValueError("a row has LoRAs that are not here")
        return replace(row, loras=self._loras.loras) if active else row

    def close(self) -> None:
        self._loras.close()


def loras_part(specs: Sequence[LoraSpec]) -> OffloadedPart:
    """What the other worker of a pair is told of these."""
    said = tuple(_Lora(name=spec.name, digest=spec.digest, scale=spec.scale) for spec in specs)
    return OffloadedPart(header=_LORAS.dump_json(said))


def read_loras(part: OffloadedPart) -> tuple[LoraSpec, ...]:
    """What was told. Raises ValueError where it breaks a rule."""
    said = _LORAS.validate_json(part.header)
    return tuple(LoraSpec(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in said)

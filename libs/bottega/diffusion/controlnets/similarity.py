"""How much the residuals of ControlNets change from step to step, measured where forwards take them.

It wraps a provider of ControlNets; sessions whose staleness is not asked for pass through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlInput, ControlNetProvider, ControlRecord
from bottega.diffusion.rows import Half, Row

# An image and one of its halves.
_Half = tuple[Hashable, Half]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Of the residuals at one point in two adjacent steps: their inner product, and each one's with itself.

    Scalars on the device, read when the session has ended.
    """

    between: Tensor
    before: Tensor
    after: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class SimilarityMeter:
    """Sees the residuals of one session. A step that is repeated counts once, as it came last."""

    _products: dict[tuple[_Half, int], dict[int, _Product]] = field(default_factory=dict)
    _newest: dict[_Half, dict[int, dict[int, Tensor]]] = field(default_factory=dict)

    @property
    def cosines(self) -> list[float]:
        """Between each two adjacent steps of each half of each image, over all points together."""
        return [_cosine(products) for products in self._products.values()]

    @property
    def similarity(self) -> float | None:
        """The mean of the cosines; None where there are no two steps to compare."""
        cosines = self.cosines
        return math.fsum(cosines) / len(cosines) if cosines else None

    def observe(self, row: Row, point: int, residual: Tensor) -> None:
        """A forward has taken this at a point of the row's step."""
        half = (row.owner, row.half)
        steps = self._newest.setdefault(half, {})
        for step in [step for step in steps if step < row.step - 1]:
            del steps[step]
        now = residual.detach().float().flatten().clone()  # it lies in memory that its sender has back after the step
        steps.setdefault(row.step, {})[point] = now
        before = steps.get(row.step - 1, {}).get(point)
        if before is not None:
            self._products.setdefault((half, row.step), {})[point] = _Product(
                between=before @ now, before=before @ before, after=now @ now
            )


class MeasuredControlNets:
    """Another ControlNetProvider, whose records say how similar the residuals of measured controls are."""

    def __init__(self, controlnets: ControlNetProvider) -> None:
        self._controlnets = controlnets
        self._meters: dict[Hashable, SimilarityMeter] = {}

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        handles = self._controlnets.open(controls)
        for handle, control in zip(handles, controls, strict=True):
            if control.measured:
                self._meters[handle] = SimilarityMeter()
        return handles

    def opened(self, handles: Sequence[Hashable]) -> bool:
        return self._controlnets.opened(handles)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        self._controlnets.settle(handles, timeout_s)

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        records = self._controlnets.close(handles)
        meters = [self._meters.pop(handle, None) for handle in handles]
        return tuple(
            record if meter is None else replace(record, similarity=meter.similarity)
            for record, meter in zip(records, meters, strict=True)
        )

    def ask(self, rows: list[Row]) -> None:
        self._controlnets.ask(rows)

    def ask_ahead(self, rows: list[Row]) -> None:
        self._controlnets.ask_ahead(rows)

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return self._controlnets.ready(row, points)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        self._controlnets.wait(rows, points, timeout_s)

    def is_void(self, row: Row) -> bool:
        return self._controlnets.is_void(row)

    def take(self, row: Row, point: int) -> list[Tensor]:
        addends = self._controlnets.take(row, point)
        if self._meters:
            for handle, addend in zip(row.controls, addends, strict=True):
                if handle in self._meters:
                    self._meters[handle].observe(row, point, addend)
        return addends


def _cosine(products: Mapping[int, _Product]) -> float:
    """Of all points' residuals as one vector. 0 where one of the two steps has none at all."""
    between = math.fsum(float(product.between) for product in products.values())
    lengths = math.prod(
        math.sqrt(math.fsum(float(getattr(product, name)) for product in products.values()))
        for name in ("before", "after")
    )
    return max(-1.0, min(1.0, between / lengths)) if lengths > 0 else 0.0

"""What a row of an edit reads from a recorded step, records of a new one, or adds to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from bottega.diffusion.device.device import Device, HostCopy
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.editing.recordings.areas import level_of
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.diffusion.editing.recordings.step_loads import StepLoads
from bottega.diffusion.rows import KeptProjections


class StepReader:
    """The RecordedActivations of a row that takes from a recorded step.

    loads: what was planned of what is not here; without a plan that is computed. shapes: that the network puts out, by
    name: what has another one, from a store that lies, would fail its whole batch, and is computed; None trusts it.
    projections: that are kept of the step; None keeps none.
    """

    def __init__(
        self,
        step: RecordedStep,
        device: torch.device,
        loads: StepLoads | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        projections: KeptProjections | None = None,
    ) -> None:
        self.projections = projections
        self.reused: set[str] = set()
        self.waited_s = 0.0
        self._step = step
        self._device = device
        self._loads = loads
        self._shapes = shapes

    def get(self, name: str) -> Tensor | None:
        output = self._step.get(name)
        if output is None and self._loads is not None:
            output = self._awaited(name, self._loads)
        if output is None or (self._shapes is not None and output.shape != self._shapes.get(name)):
            return None
        self.reused.add(name)
        if output.is_pinned():
            return output.to(self._device, non_blocking=True)
        return open_device(self._device).to_device(output)  # a view of a store's file is memory that is not pinned

    def stored(self, name: str) -> Tensor | None:
        return self._step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        """Nothing: who reads gives to another one."""

    def _awaited(self, name: str, loads: StepLoads) -> Tensor | None:
        before_s = loads.waited_s
        here = loads.wait_for(name)
        self.waited_s += loads.waited_s - before_s
        return self._step.get(name) if here else None


class StepRecorder:
    """The StepActivations that a row gives to which is computed in full; the forward may fail.

    kept: names of what there is room for; None keeps all. size_bytes: of what it was given so far.
    """

    def __init__(self, kept: frozenset[str] | None = None) -> None:
        self.size_bytes = 0
        self._copies: dict[str, HostCopy] = {}
        self._kept = kept

    @property
    def outputs(self) -> dict[str, Tensor]:
        """On the CPU, float16. Waits for the device where it has not computed them."""
        return {name: copy.take() for name, copy in self._copies.items()}

    def get(self, name: str) -> Tensor | None:
        copy = self._copies.get(name)
        return None if copy is None else copy.take()

    def put(self, name: str, output: Tensor) -> None:
        if self._kept is None or name in self._kept:
            # Of its own, because blocks that follow may write to the output while it leaves.
            own = output.detach().to(torch.float16, copy=True, memory_format=torch.contiguous_format)
            before = self._copies.get(name)
            self.size_bytes += own.nbytes - (0 if before is None else before.take().nbytes)
            self._copies[name] = open_device(own.device).to_host(own)

    @property
    def finite(self) -> bool:
        """Whether float16 has room for all of it."""
        return _finite(self.outputs.values())


class StepCompleter:
    """The StepActivations of a row that computes parts of the template which a recorded step lacks.

    step: writable. area: bool [height, width] of the latent: cells that are computed, and wholly the template's.
    Whatever happens to the forward, what it has put out there is the template's. Whether it is all of it, `grow` says.
    """

    def __init__(self, step: RecordedStep, area: Tensor) -> None:
        self.step = step
        self.area = area
        self._copies: dict[str, HostCopy] = {}
        self._within: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def get(self, name: str) -> Tensor | None:
        return self.step.get(name)

    def put(self, name: str, output: Tensor) -> None:
        stored = self.step.get(name)
        if stored is None or stored.shape != output.shape:
            return  # what was not recorded is computed in full, and remains so
        device = open_device(output.device)
        _, index = self._inside(output, device)
        # Places by their numbers: a GPU would have to be waited for to know how many a map of them has.
        cut = output.detach().index_select(0, index) if output.ndim == 2 else output.flatten(1).index_select(1, index)
        self._copies[name] = device.to_host(cut.to(torch.float16))

    @torch.inference_mode()
    def write(self) -> bool:
        """Writes what was put out, and waits for it where it has not come. Whether it has written anything.

        All of it or nothing: what float16 has no room for would spoil the edits of everyone who reads the step.
        """
        outputs = {name: copy.take() for name, copy in self._copies.items()}
        self._copies = {}
        if not outputs or not _finite(outputs.values()):
            return False
        for name, output in outputs.items():
            stored = self.step.get(name)
            if stored is not None:
                inside, _ = self._inside(stored, open_device(stored.device))
                stored[(inside.flatten(),) if stored.ndim == 2 else (slice(None), inside)] = output
        return True

    def _inside(self, output: Tensor, device: Device) -> tuple[Tensor, Tensor]:
        """The area at an output's level, bool [height, width] on the CPU, and its places by number on the device."""
        # Cells are whole tokens of every level.
        size = level_of(self.area.shape, output.shape[0]) if output.ndim == 2 else (output.shape[1], output.shape[2])
        if size not in self._within:
            area = self.area[None].float()
            while area.shape[1] > size[0] or area.shape[2] > size[1]:
                area = functional.max_pool2d(area, 2, ceil_mode=True)
            inside = area[0] > 0
            self._within[size] = inside, device.to_device(inside.flatten().nonzero()[:, 0])
        return self._within[size]


def _finite(outputs: Iterable[Tensor]) -> bool:
    """Whether float16 had room for all of it. outputs: on the CPU."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)

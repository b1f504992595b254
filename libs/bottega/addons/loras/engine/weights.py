"""The weights of one model: which LoRA set is merged into them, and which sets are computed beside them.

Weights change only between two forward passes. In single precision LoRAs are merged into the text encoders, for one
prompt at a time, and into the denoising network when all rows use the same set for long enough. In half precision
merging rounds differently from stock Diffusers, so that LoRAs are computed beside the weights as PEFT does, unless
merging is allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from bottega.addons.loras.engine.lora import LoraAtScale, LoraLayer
from bottega.addons.loras.engine.lora_set import expanded_bytes, make_set_in_pieces, set_key
from bottega.addons.loras.engine.patching import Patcher, SwapCosts
from bottega.addons.loras.engine.unmerged import STACKED_BYTES, UnmergedLoras
from bottega.device.device import Span, run_pieces
from bottega.device.memory_plan import MemoryPlan
from bottega.errors import LoraUnusable, TooLarge
from bottega.model.backbone import RowSpans
from bottega.model.model import Model
from bottega.model.rows import Difference, LoraSet, SetKey
from bottega.model.weights import dtype_name

_log = logging.getLogger(__name__)

# Layers and rank of the probe: attention's projections, which most LoRAs change.
_PROBE_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
_PROBE_RANK = 16
# Bytes of weights that a swap is measured with. All of SDXL's probe layers would need 2 GB for the copies.
_PROBE_BYTES = 256 << 20
# Name of the copies in the plan of the device's memory.
_COPIES = "pristine copies"
_DIFFERENCES = "LoRAs without a low-rank form"


class LoraWeights:
    """The weights of a model's networks, with the LoRAs that its batch rows need.

    Args:
        model: The model; its weights change in place.
        patches: Whether sets may be merged into the denoising network's weights. If not, all are computed beside them,
            row by row, so that the last bits of a picture depend neither on other rows nor on measurements.
        merges_half: Whether sets may be merged into float16 and bfloat16 weights, which rounds differently from stock.
        pristine_on_host: Keep the copies that restore merged weights in host memory.
        stacked_bytes: See UnmergedLoras.
    """

    def __init__(
        self,
        model: Model,
        *,
        patches: bool = True,
        merges_half: bool = False,
        pristine_on_host: bool = False,
        stacked_bytes: int = STACKED_BYTES,
    ) -> None:
        networks = model.networks
        self.denoiser, _ = model.denoiser
        """Part of the denoising network, as components of LoRAs name it."""
        self._family = model.family.name
        keep_on = torch.device("cpu") if pristine_on_host else None
        self.costs = SwapCosts()
        self.swaps = 0
        self._kept_on = str(keep_on or model.device)
        self._logged_bytes = 0
        self._networks = networks
        self._device = model.runtime
        self._memory = MemoryPlan() if pristine_on_host else model.memory
        self._device_memory = model.memory
        self._dtype, self._operations = model.dtype, model.operations
        self._half = model.dtype != torch.float32
        self._as_peft = self._half and not merges_half
        self._patches = patches and not self._as_peft
        self._unmerged = UnmergedLoras(
            networks[self.denoiser], self.denoiser, row_by_row=not patches, stacked_bytes=stacked_bytes
        )
        self._unmerged_text = {
            name: UnmergedLoras(network, name) for name, network in networks.items() if name != self.denoiser
        }
        self._patchers = {
            name: Patcher(
                network,
                name,
                keep_on=keep_on,
                # Kernels write to the device.
                operations=None if name in model.memory.on_host else model.operations,
            )
            for name, network in networks.items()
        }
        self._sets: WeakValueDictionary[SetKey, LoraSet] = WeakValueDictionary()
        self._differences: WeakSet[Difference] = WeakSet()
        self._reserved_differences: int | None = 0
        self._making_bytes = 0

    def rounds_as_stock(self, *, low_rank: bool) -> bool:
        """Return whether results with a LoRA are rounded as in stock Diffusers, in the model's precision.

        Args:
            low_rank: Whether the LoRA is nothing but low-rank factors.
        """
        return not self._half or (self._as_peft and low_rank)

    @property
    def patched(self) -> LoraSet | None:
        """The set that is merged into the denoising network's weights; None without one."""
        return self._patchers[self.denoiser].patched

    @property
    def patched_key(self) -> SetKey:
        """Key of the set that is merged into the denoising network's weights; empty without one."""
        patched = self.patched
        return patched.key if patched else ()

    @property
    def pristine_bytes(self) -> int:
        """Bytes of the copies of original weights of all components, which are kept for the next set."""
        return sum(patcher.pristine_bytes for patcher in self._patchers.values())

    @property
    def swap_s(self) -> float:
        """Seconds to merge and restore a set like the last one in the denoising network; 0 if no set is merged."""
        return self.costs.last_swap_s if self._patches else 0.0

    def text_set(self, uses: Sequence[LoraAtScale]) -> LoraSet:
        """Return the result of `text_set_in_pieces` at once."""
        return run_pieces(self.text_set_in_pieces(uses))

    def text_set_in_pieces(self, uses: Sequence[LoraAtScale]) -> Generator[None, None, LoraSet]:
        """Return the factors for the text encoders. Raise LoraUnusable, also if the model lacks one of them."""
        return (yield from self._make_set(uses, tuple(self._unmerged_text)))

    def key_of(self, uses: Sequence[LoraAtScale]) -> SetKey:
        """Return the key of the set for the denoising network."""
        return set_key(uses, as_peft=self._as_peft)

    def denoiser_set(self, uses: Sequence[LoraAtScale]) -> LoraSet:
        """Return the result of `denoiser_set_in_pieces` at once."""
        return run_pieces(self.denoiser_set_in_pieces(uses))

    def denoiser_set_in_pieces(self, uses: Sequence[LoraAtScale]) -> Generator[None, None, LoraSet]:
        """Return the factors for the denoising network, as the same object while a set is used. Raise LoraUnusable."""
        key = self.key_of(uses)
        known = self._sets.get(key)
        if known is None:
            made = yield from self._make_set(uses, [self.denoiser])
            known = self._sets.setdefault(key, made)  # another job may have made the same one in the meantime
        return known

    def _make_set(self, uses: Sequence[LoraAtScale], components: Sequence[str]) -> Generator[None, None, LoraSet]:
        """Make a set, with memory reserved for its differences while they are used. Raise LoraUnusable, TooLarge."""
        for component in (name for use in uses for name, layers in use.layers.items() if layers):
            if component not in self._networks:
                why = f"which this {self._family} model does not have: it is for another model"
                raise LoraUnusable(f"a LoRA changes {component}, {why}")
            if (own := next(self._networks[component].parameters()).dtype) != self._dtype:
                raise LoraUnusable(
                    f"a LoRA changes {component}, which this worker computes in {dtype_name(own)} and its model in "
                    f"{dtype_name(self._dtype)} (engine.text.{component}.dtype); use a worker with one data type"
                )
        size_bytes = sum(expanded_bytes(uses, self._networks[name], name) for name in components)
        if size_bytes:
            yield  # What follows takes memory, and long.
        try:
            self._reserve_differences(size_bytes)
        except TooLarge:
            self._drop_kept()
            self._reserve_differences(size_bytes)
        self._making_bytes += size_bytes
        try:
            made = yield from make_set_in_pieces(
                uses, self._networks, components, as_peft=self._as_peft, original=self._original
            )
        finally:
            self._making_bytes -= size_bytes
        for differences in made.differences.values():
            self._differences.update(differences.values())
        return made

    def _drop_kept(self) -> None:
        """Drop what is kept for later requests. Sets in use are computed beside the weights from here on."""
        self._unmerged.drop_plans()
        self.put_in_text(None)  # The prompt for which they were changed has been encoded.
        if self.patched is not None:
            self.put_in_denoiser(None)

    def _reserve_differences(self, more_bytes: int = 0) -> None:
        """Reserve memory for the differences that are in use or being made, and for `more_bytes` of others."""
        used = [difference.size_bytes for difference in self._differences]
        more_bytes += self._making_bytes
        if more_bytes or len(used) != self._reserved_differences:
            self._device_memory.reserve(_DIFFERENCES, more_bytes + sum(used))
            # Unknown until the others are made.
            self._reserved_differences = None if more_bytes else len(used)

    def _original(self, component: str, path: str) -> Tensor:
        return self._patchers[component].original(path)

    def put_in_text(self, loras: LoraSet | None) -> float:
        """Make the text encoders use these LoRAs, or none, for the next prompt.

        Returns:
            The seconds it took, after waiting for the device; 0 without LoRAs, and if nothing is merged.
        """
        if self._as_peft:
            for unmerged in self._unmerged_text.values():
                if loras is None:
                    unmerged.leave()
                else:
                    unmerged.enter_all(loras)
            return 0.0
        began = self._device.record()
        if self._device_memory.on_host:
            began.wait()  # Weights that are kept on the host may be on their way to the device.
        for name in self._unmerged_text:
            _put(self._patchers[name], loras)
        if loras is None:
            return 0.0  # not measured, because the time is not charged to a job
        seconds = Span(begin=began, end=self._device.record()).seconds
        self._log_copies()
        return seconds

    def put_in_denoiser(self, loras: LoraSet | None) -> float:
        """Merge a set into the denoising network's weights, or restore them.

        Returns:
            The seconds it took, after waiting for the device's running step.
        """
        patcher = self._patchers[self.denoiser]
        copied = patcher.pristine_bytes
        began = self._device.record()
        _put(patcher, loras)
        seconds = Span(begin=began, end=self._device.record()).seconds
        self.swaps += 1
        if loras is not None and patcher.pristine_bytes <= copied:  # no copies were made, as usual for later swaps
            self.costs.observe_patch(patcher.touched_bytes(loras), seconds)
        return seconds

    def choose(self, sets: Sequence[LoraSet | None], *, steps: int, step_s: float) -> float:
        """Merge LoRAs or restore weights for the next steps, if that saves time. Return the seconds it took.

        Args:
            sets: Sets of all running requests; None for a request without LoRAs.
            steps: Number of remaining steps of the request that has the most.
            step_s: Seconds of a step.
        """
        wanted = sets[0] if sets and all(request_set is sets[0] for request_set in sets) else None
        if not sets or wanted is self.patched:
            return 0.0  # without requests, the merged set stays for the next one
        if wanted is None or not self._pays(wanted, steps, step_s):
            return self.put_in_denoiser(None) if self.patched else 0.0
        try:
            self._memory.reserve(_COPIES, self._patchers[self.denoiser].touched_bytes(wanted))
            seconds = self.put_in_denoiser(wanted)
        except (torch.OutOfMemoryError, TooLarge) as error:
            self._memory.release(_COPIES)
            self._patches = False
            _log.warning(
                "the device has no memory for copies of weights; LoRAs are computed beside the weights from now on",
                extra={"pristine_mib": self._patchers[self.denoiser].touched_bytes(wanted) >> 20, "why": str(error)},
            )
            return 0.0
        self._log_copies()
        return seconds

    def enter(self, sets: Sequence[LoraSet | None], spans: RowSpans | None = None) -> None:
        """Make row i of the forward pass that begins, or continues with fewer rows, use sets[i]; see UnmergedLoras."""
        if self.patched is not None and any(row_set is not self.patched for row_set in sets):
            self.put_in_denoiser(None)
        self._reserve_differences()
        self._unmerged.enter([None if row_set is self.patched else row_set for row_set in sets], spans)

    def leave(self) -> None:
        """End the forward pass."""
        self._unmerged.leave()

    def observe_forward(self, sets: Sequence[LoraSet | None], seconds: float, plain_s: float | None) -> bool:
        """Update the cost of unmerged LoRAs. Return whether the forward pass took no longer than without LoRAs.

        Args:
            sets: Sets of the rows.
            seconds: Duration of the forward pass.
            plain_s: Duration of a forward pass of as many rows without LoRAs; None if it is not known.
        """
        unmerged = {row_set for row_set in sets if row_set is not None and row_set is not self.patched}
        if len(unmerged) == 1 and plain_s and all(row_set is not None for row_set in sets):
            self.costs.observe_step(next(iter(unmerged)).key, seconds, plain_s)
        return not unmerged

    def probe(self, *, max_bytes: int | None = None) -> LoraSet:
        """Return a set that changes nothing, for measurements, for at most `max_bytes` of weights; None for all."""
        layers: dict[str, LoraLayer] = {}
        touched_bytes = 0
        for path, module in self._networks[self.denoiser].named_modules():
            if isinstance(module, nn.Linear) and path.endswith(_PROBE_LAYERS):
                touched_bytes += module.weight.nbytes
                if layers and max_bytes is not None and touched_bytes > max_bytes:
                    break
                down = torch.zeros(_PROBE_RANK, module.in_features)
                layers[path] = LoraLayer(down=down, up=torch.zeros(module.out_features, _PROBE_RANK), scale=1.0)
        name = "" if max_bytes is None else "part"  # the digest distinguishes the two probes
        return self.denoiser_set([LoraAtScale(digest=name, scale=0.0, layers={self.denoiser: layers})])

    def measure_swap(self) -> None:
        """Measure a swap by merging the probe into a part of the denoising network and restoring it, twice.

        The second time the copies already exist. The cost of a swap is proportional to the bytes that it changes.
        """
        if not self._patches or self._operations.rounds_weights:
            return
        part = self.probe(max_bytes=_PROBE_BYTES)
        for _ in range(2):
            self.put_in_denoiser(part)
            self.put_in_denoiser(None)
        self.costs.expect_patch(self._patchers[self.denoiser].touched_bytes(self.probe()))
        self._patchers[self.denoiser].restore()

    def restore(self) -> None:
        """Restore all weights, and free the copies."""
        for unmerged in self._unmerged_text.values():
            unmerged.leave()
        for patcher in self._patchers.values():
            patcher.restore()
        self._memory.release(_COPIES)

    def _log_copies(self) -> None:
        """Log the bytes of the copies of original weights when they reach a new maximum."""
        if self.pristine_bytes > self._logged_bytes:
            self._logged_bytes = self.pristine_bytes
            facts = {"pristine_mib": round(self._logged_bytes / (1 << 20), 1), "kept_on": self._kept_on}
            _log.info("copies of the weights that LoRAs were merged into take memory", extra=facts)

    def _pays(self, wanted: LoraSet, steps: int, step_s: float) -> bool:
        touched = self._patchers[self.denoiser].touched_bytes(wanted)
        merges = self._patches and not self._operations.rounds_weights
        return merges and self.costs.pays(wanted.key, steps=steps, step_s=step_s, touched_bytes=touched)


def _put(patcher: Patcher, loras: LoraSet | None) -> None:
    """Merge a set, or restore the weights if it is None or if merging fails halfway."""
    if loras is None:
        patcher.put_back()
        return
    try:
        patcher.patch(loras)
    except Exception:
        patcher.restore()
        raise

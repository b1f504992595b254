"""Merges LoRAs into weights in place, restores these from copies of the changed layers, and measures what it costs.

A weight becomes W0 + up @ down + difference.

Restoring from copies keeps the weights equal bit for bit after any number of swaps, in every element type. The copies
stay for the next set, because making them costs more than the sums. Parameters keep their addresses in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from bottega.device.devices import compute_alone
from bottega.engine.acceleration.acceleration import Probe
from bottega.model.model import Model
from bottega.model.operations import Operations, WeightSum, as_matrix, down_matrix
from bottega.model.rows import Factors, LoraSet, SetKey

# Bytes of weights. For fewer, waking threads, a tenth of a millisecond each, takes longer than the work they take over.
_MIN_THREADED_BYTES = 4 << 20
_WEIGHT, _BIAS = ".weight", ".bias"
# Estimates until something is measured. The share is that of the miniature with rank 16 in all attention layers. The
# seconds per byte are half a pass through a slow core's memory for every read and write of merging and restoring.
_FIRST_SHARE = 0.15
_FIRST_S_PER_BYTE = 3e-9
# Weight of a new measurement.
_NEW_SHARE = 0.2
# Number of sets whose share is remembered.
_MAX_SETS = 64


class Patcher:
    """The weights of one component, with one set of LoRAs merged into them, or none.

    Call it between two forward passes: nothing may read the weights during a call.

    Args:
        network: The component.
        component: Name of the component in `LoraSet`.
        keep_on: Device of the copies of original ("pristine") weights; None for the weights' own device.
        operations: Kernels that write the sums.
    """

    def __init__(
        self,
        network: nn.Module,
        component: str,
        *,
        keep_on: torch.device | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._modules = dict(network.named_modules())
        self._component = component
        self._keep_on = keep_on
        self._operations = operations or Operations()
        self._pristine: dict[str, Tensor] = {}
        self._patched: LoraSet | None = None

    @property
    def patched(self) -> LoraSet | None:
        """The merged set; None if the weights are the original ones."""
        return self._patched

    @property
    def pristine_bytes(self) -> int:
        """Bytes of the copies of original weights, which cover the layers of the last set until `restore`."""
        return sum(copy.nbytes for copy in self._pristine.values())

    def touched_bytes(self, loras: LoraSet) -> int:
        """Return the bytes of the weights that a set changes."""
        return sum(self._parameter(name).nbytes for name in self._changed(loras))

    def original(self, path: str) -> Tensor:
        """Return the weight of a module without LoRAs, perhaps on another device."""
        name = f"{path}{_WEIGHT}"
        if self._patched is not None and name in self._pristine:
            return self._pristine[name]
        weight = self._parameter(name)
        # Quantized weights are a subclass.
        return weight if type(weight) is Tensor else weight.dequantize()

    @torch.inference_mode()
    def patch(self, loras: LoraSet) -> None:
        """Merge a set, in place of the set that is merged now."""
        if loras is self._patched:
            return
        names = self._changed(loras)
        self._forget([name for name in self._pristine if name not in names])
        changed = set(self._pristine) if self._patched is not None else set()
        self._patched = loras  # set before the first weight changes, so that restore works if the rest fails
        self._share_out(lambda share: self._write(share, loras, changed), names)

    @torch.inference_mode()
    def put_back(self) -> None:
        """If a set is merged, restore the original weights, bit for bit, and keep the copies."""
        if self._patched is not None:
            self._copy_back(list(self._pristine))
        self._patched = None

    @torch.inference_mode()
    def restore(self) -> None:
        """Restore the original weights, and free the copies."""
        self.put_back()
        self._pristine.clear()

    def _changed(self, loras: LoraSet) -> list[str]:
        """Return the names of the parameters that a set changes."""
        names = dict.fromkeys(f"{path}{_WEIGHT}" for path in loras.of(self._component))
        for path, difference in loras.differences_of(self._component).items():
            if difference.weight is not None:
                names[f"{path}{_WEIGHT}"] = None
            if difference.bias is not None:
                names[f"{path}{_BIAS}"] = None
        return list(names)

    def _forget(self, names: list[str]) -> None:
        if self._patched is not None:
            self._copy_back(names)
        for name in names:  # after copying, so that a failed copy can be repeated
            del self._pristine[name]

    def _write(self, names: Iterable[str], loras: LoraSet, changed: Collection[str]) -> None:
        """Write the sums of these parameters. `changed` has those into which a set is merged now."""
        factors, differences = loras.of(self._component), loras.differences_of(self._component)
        low_rank = [name for name in names if name.endswith(_WEIGHT) and name.removesuffix(_WEIGHT) in factors]
        if low_rank:
            write = self._operations.write_sums or _write_sums
            write(self._sums(low_rank, factors, changed))
        for name in names:
            path, _, kind = name.rpartition(".")
            difference = differences.get(path)
            added = None if difference is None else difference.bias if f".{kind}" == _BIAS else difference.weight
            if added is not None:
                parameter = self._parameter(name)
                before = parameter if name in low_rank else self._before(name, changed)
                torch.add(before.to(parameter.device), added.to(parameter.device), out=parameter)

    def _before(self, name: str, changed: Collection[str]) -> Tensor:
        """Return a parameter without LoRAs, and keep a copy of it."""
        parameter = self._parameter(name)
        if name not in self._pristine:
            self._pristine[name] = parameter.to(self._keep_on or parameter.device, copy=True)
        return self._pristine[name] if name in changed else parameter

    def _sums(
        self, names: Iterable[str], factors: Mapping[str, Factors], changed: Collection[str]
    ) -> Iterator[WeightSum]:
        """Yield the sums one by one, so that a weight that is copied first is still in the cache when it is written."""
        for name in names:
            before = self._before(name, changed)
            path = name.removesuffix(_WEIGHT)
            yield WeightSum(weight=self._parameter(name), before=before, factors=factors[path])

    def _copy_back(self, names: Sequence[str]) -> None:
        self._share_out(self._copy, names)

    def _copy(self, names: Sequence[str]) -> None:
        if names:
            torch._foreach_copy_([self._parameter(name) for name in names], [self._pristine[name] for name in names])

    def _share_out(self, work: Callable[[Sequence[str]], None], names: Sequence[str]) -> None:
        """Divide the layers among as many threads as torch uses here, and run `work` in each.

        If threads shared one layer after the other, waking each other for each layer would take as long as a small
        layer.
        """
        parameters = [self._parameter(name) for name in names]
        if any(parameter.is_cuda for parameter in parameters):
            work(names)
            return
        shares = min(torch.get_num_threads(), len(names))
        if sum(parameter.nbytes for parameter in parameters) < _MIN_THREADED_BYTES:
            shares = 1
        futures = [_threads().submit(torch.inference_mode()(work), names[i::shares]) for i in range(shares)]
        wait(futures)
        for future in futures:
            future.result()

    def _parameter(self, name: str) -> Tensor:
        path, _, kind = name.rpartition(".")
        parameter = getattr(self._modules[path], kind)
        assert isinstance(parameter, Tensor), "a set names linear and convolution layers alone, and biases that exist"
        return parameter.data


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return a pool of threads that is kept, because the first product in a new thread takes milliseconds longer."""
    return ThreadPoolExecutor(thread_name_prefix="patch", initializer=compute_alone)


def _write_sums(sums: Iterable[WeightSum]) -> None:
    for weight_sum in sums:
        _write_sum(weight_sum)


def _write_sum(weight_sum: WeightSum) -> None:
    weight, low, up = weight_sum.weight, down_matrix(weight_sum), weight_sum.factors.up
    low, up = low.to(weight.device), up.to(weight.device)  # which may be the host
    after = as_matrix(weight)
    # A pristine weight is read and written in one pass.
    before = after if weight_sum.before is weight else as_matrix(weight_sum.before.to(weight.device))
    if weight.dtype == torch.float32:
        torch.addmm(before, up, low, out=after)
    else:
        after.copy_(torch.addmm(before.float(), up.float(), low.float()))


_RANK = 32
# Bytes of weights that the probe's LoRA patches, which are copied meanwhile, and number of layers that are compared.
_PATCHED_BYTES = 256 << 20
_COMPARED_LAYERS = 4


def patch_probe(model: Model) -> Probe:
    """Return a probe that merges a LoRA and restores the weights bit for bit."""
    component, network = model.denoiser
    layers = dict(_layers(network))
    generator = torch.Generator("cpu").manual_seed(0)
    factors = {path: _factors(layer, generator) for path, layer in layers.items()}
    loras = LoraSet(key=(("self-check", 1.0),), components={component: factors})
    compared = list(layers.values())[:_COMPARED_LAYERS]

    def run() -> Sequence[Tensor]:
        patcher = Patcher(network, component, operations=model.operations)
        try:
            patcher.patch(loras)
            return [layer.weight.detach().clone() for layer in compared]
        finally:
            patcher.restore()

    return run


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield projections of attention, which most LoRAs change, up to a total size."""
    size_bytes = 0
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear) and path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            size_bytes += module.weight.nbytes
            if size_bytes > _PATCHED_BYTES:
                return
            yield path, module


def _factors(layer: nn.Linear, generator: torch.Generator) -> Factors:
    weight = layer.weight
    down = torch.randn(_RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
    up = torch.randn(weight.shape[0], _RANK, generator=generator) * 0.05
    return Factors(down=down.to(weight), up=up.to(weight))


class SwapCosts:
    """The measured costs of LoRAs in one engine."""

    def __init__(self) -> None:
        self._share = _FIRST_SHARE
        self._shares: dict[SetKey, float] = {}
        self._s_per_byte: float | None = None
        self._patched_bytes = 0  # bytes of weights that the last measured set changes

    @property
    def last_swap_s(self) -> float:
        """Seconds to merge and restore a set like the last one; 0 before the first."""
        return self.swap_s(self._patched_bytes)

    def share(self, key: SetKey) -> float:
        """Return the time that an unmerged set adds to a step, as a share of a plain step; an average for a new set."""
        return self._shares.get(key, self._share)

    def swap_s(self, touched_bytes: int) -> float:
        """Return the seconds to merge LoRAs into `touched_bytes` of weights and to restore these."""
        per_byte = _FIRST_S_PER_BYTE if self._s_per_byte is None else self._s_per_byte
        return touched_bytes * per_byte

    def observe_step(self, key: SetKey, seconds: float, plain_s: float) -> None:
        """Update the cost of an unmerged set from a step in which all rows used it.

        Args:
            key: The set of LoRAs.
            seconds: Duration of the step.
            plain_s: Duration of the same step without LoRAs.
        """
        share = min(max(seconds / plain_s - 1.0, 0.0), 2.0 * self.share(key) + 0.1)  # bounded, to ignore outliers
        self._share += _NEW_SHARE * (share - self._share)
        before = self._shares.pop(key, share)
        self._shares[key] = before + _NEW_SHARE * (share - before)
        if len(self._shares) > _MAX_SETS:
            del self._shares[next(iter(self._shares))]

    def observe_patch(self, touched_bytes: int, seconds: float) -> None:
        """Update the cost of merging per byte. Restoring the weights is taken to cost half as much."""
        if touched_bytes:
            measured = 1.5 * seconds / touched_bytes
            before = measured if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = before + _NEW_SHARE * (measured - before)
            self._patched_bytes = touched_bytes

    def expect_patch(self, touched_bytes: int) -> None:
        """Assume that sets change `touched_bytes` of weights, until the first one is merged."""
        self._patched_bytes = touched_bytes

    def pays(self, key: SetKey, *, steps: int, step_s: float, touched_bytes: int) -> bool:
        """Return whether merging saves time for a set that all rows use for `steps` more steps of `step_s` seconds."""
        return steps * step_s * self.share(key) > self.swap_s(touched_bytes)

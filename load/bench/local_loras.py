"""LoRAs from canonical files on this machine, for an engine without a store."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from bottega.addons.loras.engine import Layers, LoraHandle, LoraLayer, LoraRef, WholeLayer, make_layer
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.addons.loras.wire.module_parts import DENOISERS, SCALE
from bottega.errors import DataLoss, LoraNotFound
from bottega.safetensors_header import TensorEntry
from bottega.v1.fleet_pb2 import ServiceAddress

_THREADS = 4
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True, kw_only=True, eq=False)
class _Handle:
    """A LoraHandle of a file that is read in a thread."""

    load: Future[tuple[Mapping[str, Layers], float]]
    begun_s: float

    @property
    def text_ready(self) -> bool:
        return self.ready

    @property
    def ready(self) -> bool:
        return self.load.done() and bool(self.load.result())

    @property
    def load_s(self) -> float:
        return (self.load.result()[1] if self.ready else monotonic()) - self.begun_s

    @property
    def work(self) -> None:
        """None, as no store has brought it."""

    @property
    def ignored(self) -> int:
        """Number of layers that were left out; benches have whole LoRAs."""
        return 0

    def layers(self, component: str) -> Layers:
        return self.load.result()[0].get(component, {})


class LocalLoras:
    """A LoraSource that maps and hashes files in threads. Stop it, or use it in a `with` block.

    Args:
        files: By digest; more may be added.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="loras")

    def __enter__(self) -> LocalLoras:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End its threads."""
        self._threads.shutdown(cancel_futures=True)

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Ignore stores."""

    def begin(self, ref: LoraRef) -> LoraHandle:
        """Begin to read a file."""
        begun_s = monotonic()  # before its thread has any chance to end
        return _Handle(load=self._threads.submit(self._load, ref), begun_s=begun_s)

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        """Wait until one of the handles has been read."""
        pending = {handle.load for handle in handles if isinstance(handle, _Handle) and not handle.load.done()}
        if pending:
            wait(pending, timeout_s, FIRST_COMPLETED)

    def close(self, handles: Sequence[LoraHandle]) -> None:
        """Give handles back; a mapping ends with the last tensor that views it."""
        for handle in handles:
            assert isinstance(handle, _Handle), "every handle was made here"
            handle.load.cancel()

    def _load(self, ref: LoraRef) -> tuple[Mapping[str, Layers], float]:
        path = self._files.get(ref.digest)
        if path is None:
            raise LoraNotFound(f"no LoRA {ref.name} ({ref.digest})", metadata={"loras": ref.name})
        with path.open("rb") as file:
            lora = canonical.read(file)
            # Private and writable, as torch wants it; nobody writes.
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        if hashlib.sha256(content).hexdigest() != ref.digest:
            raise DataLoss(f"LoRA {ref.name} is not what its digest says", metadata={"loras": ref.name})
        end = lora.header_bytes + lora.text_bytes
        return _read_layers(lora, content[lora.header_bytes : end], content[end:]), monotonic()


def _read_layers(
    lora: CanonicalLora, text: memoryview, denoiser: memoryview
) -> dict[str, dict[str, LoraLayer | WholeLayer]]:
    """Return layers by component and module path, from the file's sections in writable memory."""
    layers: dict[str, dict[str, LoraLayer | WholeLayer]] = {}
    for module in lora.modules:
        section = denoiser if module.component in DENOISERS else text
        (scale,) = struct.unpack_from("<f", section, module.scale.begin)
        parts = {part: _view(section, entry) for part, entry in module.parts.items() if part != SCALE}
        layers.setdefault(module.component, {})[module.path] = make_layer(parts, scale)
    return layers


def _view(section: memoryview, entry: TensorEntry) -> Tensor:
    raw = torch.frombuffer(section[entry.begin : entry.end], dtype=_DTYPES[entry.dtype])
    return raw.view(entry.shape)

"""LoRAs in canonical form without an importer, a store's links without its service, and a process that is a worker.

`python -m tests.support.shared_loras` reads lines of JSON, fetches the digest that each names or looks at it again, and
answers each with a line of what it has and what that has taken.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import io
import json
import os
import queue
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import FilesByPath
from bottega.errors import LoraNotFound, PeerDead
from bottega.loras.worker_link import LoraLinks
from bottega.model_files.family_names import UNET
from bottega.process.engine_supervisor import engine_environment
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.safetensors_header import LENGTH_BYTES, header_bytes
from bottega.transport import Offer, ServiceOffer, offer_from_wire, offer_to_wire
from bottega.v1.link_pb2 import LinkOffer
from tests.samples.lora_files import low_rank
from tests.support.offers import OffersAtOnce

PATIENCE_S = 30.0
# Rank and width: of some 144 KiB and some 64 MiB.
SMALL, LARGE = (16, 512), (512, 8192)
_STATUS = re.compile(r"^(RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)
_STARTED = "started\n"
_MAPPED = re.compile(r" (\d+) +/memfd:lora")


def canonical_file(size: tuple[int, int], *, seed: int = 0, odd: bool = False) -> bytes:
    """Four layers of the UNet in single precision, behind a text encoder's in half. odd: number of its items."""
    rank, width = size
    draw = random.Random(seed)
    modules = [
        ModuleWeights(
            component=UNET,
            path=f"down_blocks.{number}.to_q",
            scale=0.5 + number,
            parts={"down": _weights(draw, "F32", rank, width), "up": _weights(draw, "F32", 64, rank)},
        )
        for number in range(4)
    ]
    down, up = _weights(draw, "F16", 1, 2), _weights(draw, "F16", 3 if odd else 2, 1)
    parts = {"down": down, "up": up}
    modules.append(ModuleWeights(component="text_encoder", path="layers.0.q_proj", scale=1.0, parts=parts))
    file = io.BytesIO()
    canonical.write(file, modules)
    return file.getvalue()


def layers_digest(file: bytes) -> str:
    """Of the bytes of all of the UNet's layers, in their order."""
    lora = canonical.parse(file[: header_bytes(file[:LENGTH_BYTES])], file_bytes=len(file))
    start = lora.header_bytes + lora.text_bytes
    hashed = hashlib.sha256()
    for module in lora.modules:
        for entry in (module.down, module.up) if module.component == UNET else ():
            hashed.update(memoryview(file)[start + entry.begin : start + entry.end])
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A store's tiers and links, over files by digest."""

    folder: Path
    tiers: TieredCache
    links: LoraLinks

    def put(self, file: bytes) -> str:
        digest = hashlib.sha256(file).hexdigest()
        (self.folder / digest).write_bytes(file)
        return digest


@contextlib.contextmanager
def shelf(folder: Path, *, unix: bool = True, bytes_per_s: int = 0, budget_bytes: int = 1 << 30) -> Iterator[Shelf]:
    """unix: whether it has a door for its own host. bytes_per_s: of every link; 0 is without a limit."""
    tiers = TieredCache(
        FilesByPath(lambda digest: folder / digest),
        what="LoRA",
        missing=lambda digest: LoraNotFound("there is none", metadata={"loras": digest}),
        budget_bytes=budget_bytes,
        max_entries=100,
        max_loads=2,
    )
    config = LimitedLinksConfig(socket=str(folder / "links.sock") if unix else None, bytes_per_s=bytes_per_s)
    links = LoraLinks(config, cache=tiers)
    try:
        yield Shelf(folder=folder, tiers=tiers, links=links)
    finally:
        links.close()
        tiers.close()


class Taker:
    """A worker's LoRAs in a process of their own, which has been started: an offer waits for nobody's imports."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.shared_loras"]
        # That of an engine process, so that it can be a fork that has imported torch (see warm_engines.py).
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", **engine_environment(exclusive_cores=False)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == _STARTED

    def fetch(self, digest: str, offer: Offer | None = None) -> dict[str, Any]:
        """What it has, and what fetching it took. offer: where it has no link yet."""
        encoded = base64.b64encode(offer_to_wire(offer).SerializeToString()).decode() if offer else ""
        return self._ask({"digest": digest, "offer": encoded, "fetch": "yes"})

    def look(self, digest: str) -> dict[str, Any]:
        """What it has of what it fetched."""
        return self._ask({"digest": digest, "offer": "", "fetch": ""})

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def _ask(self, order: dict[str, str]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextlib.contextmanager
def taker() -> Iterator[Taker]:
    made = Taker()
    try:
        yield made
    finally:
        made.end()


class QueuedOffers(OffersAtOnce):
    """Offers that somebody brings."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: queue.SimpleQueue[Offer] = queue.SimpleQueue()

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        try:
            return ServiceOffer(offer=self.brought.get_nowait(), service="store")
        except queue.Empty:
            raise PeerDead("nobody brought an offer") from None


def _serve() -> None:
    import torch

    from bottega.addons.loras.engine import LoraHandle, LoraRef
    from bottega.addons.loras.worker.addon import LoraCache
    from bottega.addons.loras.worker.store_link import LoraLinkSettings
    from bottega.transport import LinkCounters
    from bottega.v1.fleet_pb2 import ServiceAddress

    offers = QueuedOffers()
    source = LoraCache(
        offers=offers,
        device=torch.device("cpu"),
        dtype=torch.float32,
        budget_bytes=1 << 30,
        settings=LoraLinkSettings(),
        counters=LinkCounters(),
    )
    source.set_stores([ServiceAddress(name="s", address="s")])
    handles: dict[str, LoraHandle] = {}
    print(_STARTED, end="", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        digest = order["digest"]
        before = _resident_kib()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if order["offer"]:
            offers.brought.put(offer_from_wire(LinkOffer.FromString(base64.b64decode(order["offer"]))))
        if order["fetch"]:
            handles[digest] = source.begin(LoraRef(name="a", digest=digest))
            until_s = time.monotonic() + PATIENCE_S
            while not handles[digest].ready and time.monotonic() < until_s:
                source.settle([handles[digest]], 0.1)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        gc.collect()
        after = _resident_kib()
        hashed = hashlib.sha256()
        for layer in low_rank(handles[digest].layers(UNET)).values():
            for tensor in (layer.down, layer.up):
                assert tensor.data_ptr() % tensor.element_size() == 0, "where the processor wants it"
                hashed.update(tensor.numpy().data)
        answer = {
            "ready_s": took_s,
            "cpu_s": cpu_s,
            "own_bytes": (after["RssAnon"] - before["RssAnon"]) << 10,
            "shared_bytes": (after["RssShmem"] - before["RssShmem"]) << 10,
            "used_bytes": source.used_bytes,
            "inodes": [int(inode) for inode in _MAPPED.findall(Path("/proc/self/maps").read_text(encoding="utf-8"))],
            "layers": hashed.hexdigest(),
        }
        print(json.dumps(answer), flush=True)


def _resident_kib() -> dict[str, int]:
    found = _STATUS.findall(Path("/proc/self/status").read_text(encoding="utf-8"))
    return {name: int(kib) for name, kib in found}


def _weights(draw: random.Random, dtype: str, rows: int, columns: int) -> TensorData:
    code = "f" if dtype == "F32" else "e"
    few = [draw.uniform(-1.0, 1.0) for _ in range(min(rows * columns, 997))]  # a prime: no two rows look alike
    size_bytes = rows * columns * struct.calcsize(code)
    data = struct.pack(f"<{len(few)}{code}", *few)
    return TensorData(dtype=dtype, shape=(rows, columns), data=(data * (size_bytes // len(data) + 1))[:size_bytes])


if __name__ == "__main__":
    _serve()

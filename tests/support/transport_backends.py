"""Links of every backend, both ends in one process, for the tests of bottega.transport."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bottega.transport import (
    Backend,
    Deadline,
    DeviceLinks,
    DType,
    Endpoints,
    Incoming,
    Layout,
    Limits,
    Link,
    LinkCounters,
    LinkListener,
    Offer,
    SealedFile,
    TensorSpec,
    connect,
)
from bottega.transport.memory import new_file, reserve, seal

BACKENDS = tuple(backend for backend in Backend if backend is not Backend.NCCL)
"""Those that a machine without a GPU has: slot pools share memory of the host, in place of a device's."""

PATIENCE_S = 10.0
SOON_S = 0.05

LAYOUT = Layout.of(
    TensorSpec(name="deepest", dtype=DType.FLOAT16, shape=(2, 5, 7)),
    TensorSpec(name="middle", dtype=DType.FLOAT32, shape=(3, 100)),
    TensorSpec(name="scale", dtype=DType.FLOAT32, shape=()),
    TensorSpec(name="widest", dtype=DType.UINT8, shape=(100_003,)),
)
OTHER_LAYOUT = Layout.of(TensorSpec(name="deepest", dtype=DType.FLOAT16, shape=(2, 5, 8)))


def patience() -> Deadline:
    return Deadline.after(PATIENCE_S)


def soon() -> Deadline:
    return Deadline.after(SOON_S)


@contextlib.contextmanager
def listening(
    folder: Path, *, limits: Limits | None = None, token_s: float = 30.0, devices: DeviceLinks | None = None
) -> Iterator[LinkListener]:
    """A listener on a free port and on a unix socket in `folder`."""
    doors = Endpoints(tcp=("127.0.0.1", 0), unix_path=folder / "links.sock")
    with LinkListener(doors, limits=limits, token_s=token_s, devices=devices) as listener:
        yield listener


def devices_for(*backends: Backend) -> DeviceLinks | None:
    """What a process has to have for links by one of these."""
    if not any(backend.of_devices for backend in backends):
        return None
    from tests.support.host_devices import host_devices  # imports torch, which peers over host memory do without

    return host_devices()


def open_link(
    listener: LinkListener, offer: Offer, backend: Backend, *, limits: Limits | None = None, lease_s: float = 30.0
) -> tuple[Link, Link]:
    """Both ends of the link of an offer: the connecting end, the accepting end. They are set up at once."""
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, offer, patience())
        near = connect(
            offer,
            patience(),
            limits=limits,
            counters=LinkCounters(),
            lease_s=lease_s,
            backends=(backend,),
            devices=devices_for(backend),
        )
        return near, accepting.result()


@contextlib.contextmanager
def linked(
    backend: Backend, folder: Path, *, limits: Limits | None = None, lease_s: float = 30.0
) -> Iterator[tuple[Link, Link]]:
    """Both ends of a link; each end takes in `limits` and counts for itself."""
    with (
        listening(folder, limits=limits, devices=devices_for(backend)) as listener,
        opened(listener, backend, limits=limits, lease_s=lease_s) as ends,
    ):
        yield ends


@contextlib.contextmanager
def opened(
    listener: LinkListener, backend: Backend, *, limits: Limits | None = None, lease_s: float = 30.0
) -> Iterator[tuple[Link, Link]]:
    """One more link of the listener's: the connecting end, the accepting end."""
    near, far = open_link(listener, listener.offer(), backend, limits=limits, lease_s=lease_s)
    with near, far:
        yield near, far


def open_descriptors() -> int:
    """How many this process has, those of what nobody refers to any more left out."""
    return descriptor_targets().total()


def descriptor_targets() -> Counter[str]:
    """What this process's descriptors are, and how many of each: files by path, sockets and the like by kind."""
    gc.collect()
    targets: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what is being closed
            targets[re.sub(r":\[\d+\]$", "", str(descriptor.readlink()))] += 1
    return targets


def content(layout: Layout, seed: int) -> list[bytes]:
    """Bytes for every tensor of a layout, different for different seeds, tensors and places."""
    period = bytes(range(251))  # a prime, so that no two places of an alignment look alike
    parts = []
    for number, spec in enumerate(layout.specs):
        start = (seed * 31 + number * 7) % len(period)
        parts.append((period * (spec.size_bytes // len(period) + 2))[start : start + spec.size_bytes])
    return parts


FILE_NAME = "bottega-test"


@contextlib.contextmanager
def sealed_file(data: bytes) -> Iterator[SealedFile]:
    """A file that a message may carry."""
    descriptor = new_file(FILE_NAME)
    try:
        reserve(descriptor, len(data))
        os.pwrite(descriptor, data, 0)
        seal(descriptor)
        yield SealedFile(descriptor=descriptor, size_bytes=len(data))
    finally:
        os.close(descriptor)


def mapped_files() -> int:
    """How many of those files this process has mapped, those that nobody refers to any more left out."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"memfd:{FILE_NAME}")


def write(link: Link, layout: Layout, parts: list[bytes]) -> None:
    """Sends a message, written in place."""
    with link.start_message(layout, patience()) as outgoing:
        for view, part in zip(outgoing.views, parts, strict=True):
            view[:] = part
        outgoing.finish()


def read(link: Link, layout: Layout) -> list[bytes]:
    """Receives a whole message, copies it and gives it back."""
    with link.recv(patience(), layout) as incoming:
        incoming.wait_all(patience())
        return [bytes(incoming.view(index)) for index in range(len(layout.specs))]


def received(link: Link) -> Incoming:
    """The next message, whole, still held."""
    incoming = link.recv(patience(), LAYOUT)
    incoming.wait_all(patience())
    return incoming


def check_message(near: Link, far: Link, seed: int = 1, layout: Layout = LAYOUT) -> None:
    """A message arrives as it was written."""
    write(near, layout, content(layout, seed))
    assert read(far, layout) == content(layout, seed)

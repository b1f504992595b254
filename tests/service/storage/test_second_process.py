"""A second process on the folder of a service that runs refuses to start, says why, and harms nothing."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc

from bottega.controlnet.catalogue import lock_catalogue
from bottega.controlnet.config import ControlNetConfig
from bottega.v1 import lora_pb2 as pb
from bottega.v1 import lora_pb2_grpc
from tests.support.running_loras import PATIENCE_S, lora_file, upload_requests
from tests.support.services import FREE_PORTS, Service, Services
from tests.support.waiting import wait_until

_START_S = 60.0


def _second(folder: Path, module: str, config: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
    """What a second process of the same state says, when it has ended."""
    path = folder / "second.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", module, "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def _last_line(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stderr.strip().splitlines()[-1]


@contextlib.contextmanager
def _uploading(store: Service, data: bytes, folder: Path) -> Iterator[None]:
    """An upload that has begun; the rest of its messages are sent after the block."""
    with grpc.insecure_channel(store.address) as channel:
        said: queue.SimpleQueue[pb.UploadLoraRequest | None] = queue.SimpleQueue()
        messages = upload_requests("ink", data, chunk_bytes=1000)
        said.put(next(messages))
        said.put(next(messages))
        call = lora_pb2_grpc.LoraServiceStub(channel).UploadLora.future(iter(said.get, None), timeout=PATIENCE_S)
        incoming = folder / "files" / "incoming"
        wait_until(lambda: any(incoming.iterdir()), "the upload to begin")
        yield
        for message in messages:
            said.put(message)
        said.put(None)
        assert call.result().lora.name == "ink"


def test_a_second_lora_store_refuses_to_start_and_leaves_uploads_under_way_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    config = {"gateway": "", "server": FREE_PORTS, "folder": str(folder)}
    with Services(tmp_path) as services:
        store = services.start("loras", config, name="store")
        with _uploading(store, lora_file(tmp_path, rank=32).read_bytes(), folder):
            ended = _second(tmp_path, "bottega.loras", config)
            held = f"{folder} is in use by process {store.process.pid}"
            todo = "stop that one first, or configure another place (key folder)"
            assert (ended.returncode, _last_line(ended)) == (1, f"bottega.loras: {held}: {todo}")
        store.kill()
        services.start("loras", config, name="next")


def test_a_controlnet_server_refuses_to_start_on_the_file_of_another_one(tmp_path: Path) -> None:
    file = tmp_path / "nets.db"
    settings = ControlNetConfig(gateway="", catalogue=str(file))
    lock = lock_catalogue(settings, tmp_path)  # as a server that runs has it
    ended = _second(tmp_path, "bottega.controlnet", {"gateway": "", "server": FREE_PORTS, "catalogue": str(file)})
    lock.release()
    held = f"{file} is in use by process {os.getpid()}"
    todo = "stop that one first, or configure another place (key catalogue)"
    assert (ended.returncode, _last_line(ended)) == (1, f"bottega.controlnet: {held}: {todo}")

"""A second process on the folder of a service that runs refuses to start, says why, and harms nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from bottega.controlnet.catalogue import lock_catalogue
from bottega.controlnet.config import ControlNetConfig
from tests.support.services import FREE_PORTS, Services


def _last_words(services: Services, kind: str, config: Mapping[str, object]) -> str:
    """The last line of a service that does not start."""
    with pytest.raises(AssertionError, match="ended with 1 before it served") as ended:
        services.start(kind, config, name="second")
    return str(ended.value).splitlines()[-1]


def test_a_second_lora_store_refuses_to_start_and_leaves_uploads_under_way_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    config = {"gateway": "", "server": FREE_PORTS, "folder": str(folder)}
    with Services(tmp_path) as services:
        store = services.start("loras", config, name="store")
        upload = folder / "files" / "incoming" / "upload"
        upload.write_bytes(b"half of it")
        held = f"{folder} is in use by process {store.process.pid}"
        todo = "stop that one first, or configure another place (key folder)"
        assert _last_words(services, "loras", config) == f"bottega.loras: {held}: {todo}"
        assert upload.exists()
        store.kill()
        services.start("loras", config, name="next")


def test_a_controlnet_server_refuses_to_start_on_the_file_of_another_one(tmp_path: Path) -> None:
    file = tmp_path / "nets.db"
    settings = ControlNetConfig(gateway="", catalogue=str(file))
    lock = lock_catalogue(settings, tmp_path)  # as a server that runs has it
    held = f"{file} is in use by process {os.getpid()}"
    todo = "stop that one first, or configure another place (key catalogue)"
    config = {"gateway": "", "server": FREE_PORTS, "catalogue": str(file)}
    with Services(tmp_path) as services:
        assert _last_words(services, "controlnet", config) == f"bottega.controlnet: {held}: {todo}"
    lock.release()

"""What stands in deploy/: systemd takes the units as they are, and the services take the configurations."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.activations.config import ActivationsConfig
from bottega.cache.config import CacheConfig
from bottega.config import load
from bottega.controlnet.config import ControlNetConfig
from bottega.controlnet.server import open_catalogue
from bottega.gateway.config import GatewayConfig
from bottega.loras.config import LoraConfig
from bottega.manifest import ServiceSpec, read_services
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES
from bottega.process import open_files
from bottega.rpc.server import ServerConfig
from bottega.transport.handshake.credentials import GROUP_VARIABLE
from bottega.worker.config import WorkerConfig

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
UNITS = sorted(path.name for path in (DEPLOY / "systemd").iterdir())
SERVICES = [name for name in UNITS if name.endswith(".service")]
PYTHON = "/opt/bottega/bin/python"
# Tenths, of ten whole ones: a service without any hardening has 9.6.
MOST_EXPOSED = 25

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here (Debian: apt install systemd)"
)


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """The units as they are installed, one instance of each template, with a Python that is there."""
    made = []
    for name in UNITS:
        text = (DEPLOY / "systemd" / name).read_text().replace(PYTHON, sys.executable)
        made.append(tmp_path / name.replace("@.", "@miniature."))
        made[-1].write_text(text)
    return made


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def setting(unit: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", (DEPLOY / "systemd" / unit).read_text(), re.MULTILINE)
    return str(value)


@needs_systemd
def test_systemd_takes_the_units_without_a_word(installed: list[Path]) -> None:
    done = analyze("verify", "--man=no", *installed)
    assert (done.returncode, done.stdout) == (0, "")


@needs_systemd
def test_systemd_would_say_what_is_wrong_with_them(installed: list[Path]) -> None:
    broken = next(path for path in installed if path.name == "bottega-gateway.service")
    broken.write_text(broken.read_text().replace("KillMode=mixed", "KillMode=soon"))
    assert "kill mode" in analyze("verify", "--man=no", broken).stdout


@needs_systemd
def test_the_services_may_do_little(installed: list[Path]) -> None:
    services = [path for path in installed if path.suffix == ".service"]
    done = analyze("security", "--no-pager", "--offline=true", f"--threshold={MOST_EXPOSED}", *services)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", SERVICES)
def test_a_service_has_the_time_to_drain_the_files_that_it_needs_and_outlives_its_children(unit: str) -> None:
    assert setting(unit, "Type") == "notify"
    assert float(setting(unit, "TimeoutStopSec")) >= ServerConfig().drain_grace_s + 10
    assert setting(unit, "KillMode") == "mixed", "else systemd ends engines and codecs under a service that drains"
    assert setting(unit, "OOMPolicy") == "continue", "else systemd ends the service with its engine or codec process"
    assert int(setting(unit, "LimitNOFILE")) >= open_files.ENOUGH


def test_a_worker_is_given_the_time_to_load_its_model() -> None:
    assert float(setting("bottega-worker@.service", "TimeoutStartSec")) > WorkerConfig().start_s


def test_a_machine_with_workers_only_gets_no_gateway_with_them() -> None:
    target = (DEPLOY / "systemd" / "bottega.target").read_text()
    assert not re.findall(r"^(?:Wants|Requires|BindsTo|After)=", target, re.MULTILINE)
    assert [setting(unit, "WantedBy") for unit in SERVICES] == ["bottega.target"] * len(SERVICES)


def test_every_service_of_the_manifest_has_the_unit_that_the_template_gives(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DEPLOY / "units.py", tmp_path], timeout=60, check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    there = {name: (DEPLOY / "systemd" / name).read_text() for name in SERVICES}
    assert made == there, "the template or the manifest has changed: run deploy/units.py"


@pytest.mark.parametrize("service", read_services(), ids=lambda service: service.kind)
def test_a_configuration_that_cannot_be_used_is_not_tried_again(service: ServiceSpec, tmp_path: Path) -> None:
    unit = f"bottega-{service.kind}{'@' if service.count else ''}.service"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("colour: red")
    done = subprocess.run(
        [sys.executable, "-m", service.module, "--config", wrong],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == int(setting(unit, "RestartPreventExitStatus"))
    assert f"{service.module}: " in done.stderr
    assert "colour" in done.stderr


def test_a_port_that_is_taken_may_be_free_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "gateway.yaml"
        config.write_text(f'{{"server": {{"listen": "127.0.0.1:{taken.getsockname()[1]}"}}, "state": "{tmp_path}"}}')
        done = subprocess.run(
            [sys.executable, "-m", "bottega.gateway", "--config", config],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "cannot be used" in done.stderr


@pytest.mark.parametrize("unit", ["bottega-worker@.service", "bottega-controlnet@.service"])
def test_what_computes_does_not_spin_and_downloads_nothing(unit: str) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    assert "\nEnvironment=OMP_WAIT_POLICY=PASSIVE\n" in text
    assert "\nEnvironment=HF_HUB_OFFLINE=1\n" in text


@pytest.mark.parametrize(
    ("unit", "folder"),
    [
        ("bottega-controlnet@.service", "bottega-controlnet/%i"),
        ("bottega-worker@.service", "bottega-worker/%i"),
        ("bottega-loras.service", "bottega-loras"),
        ("bottega-cache.service", "bottega-cache"),
        ("bottega-activations.service", "bottega-activations"),
    ],
)
def test_services_of_the_machine_reach_the_socket_of_a_services_links_by_their_group_and_nobody_else_does(
    unit: str, folder: str
) -> None:
    assert setting(unit, "RuntimeDirectory") == folder
    assert int(setting(unit, "RuntimeDirectoryMode"), 8) == 0o750, "each is a user of its own"
    text = (DEPLOY / "systemd" / unit).read_text()
    assert f"\nEnvironment={GROUP_VARIABLE}={setting(unit, 'Group')}\n" in text
    assert f"groupadd --system {setting(unit, 'Group')}" in (DEPLOY / "README.md").read_text()


def test_the_controlnet_servers_configuration_hosts_the_embedded_models_own(tmp_path: Path) -> None:
    net = load(ControlNetConfig, DEPLOY / "config" / "controlnets" / "miniature.yaml")
    folders = open_catalogue(net, tmp_path)[0].folders
    assert set(folders) == {path.name for path in (WEIGHTS / "controlnets").iterdir()}
    assert all((folder / "config.json").is_file() for folder in folders.values())


def test_the_services_take_their_configurations() -> None:
    gateway = load(GatewayConfig, DEPLOY / "config" / "gateway.yaml")
    assert gateway == GatewayConfig(), "the file shows the defaults"
    worker = load(WorkerConfig, DEPLOY / "config" / "workers" / "miniature.yaml")
    assert (worker.name, worker.gateway) == ("miniature", gateway.fleet.listen)
    net = load(ControlNetConfig, DEPLOY / "config" / "controlnets" / "miniature.yaml")
    assert (net.gateway, net.engine.dtype) == (gateway.fleet.listen, worker.engine.dtype)
    loras = load(LoraConfig, DEPLOY / "config" / "loras.yaml")
    assert (loras.gateway, loras.bases) == (gateway.fleet.listen, LoraConfig().bases)
    assert {own.path: own.base for own in loras.loras.values()} == {f"miniature/{name}": "miniature" for name in STYLES}
    assert all((WEIGHTS / "loras" / name).is_dir() for name in STYLES)
    cache = load(CacheConfig, DEPLOY / "config" / "cache.yaml")
    assert cache == CacheConfig(name="cache", gateway=gateway.fleet.listen), "the file shows the defaults"
    activations = load(ActivationsConfig, DEPLOY / "config" / "activations.yaml")
    defaults = ActivationsConfig(name="activations", gateway=gateway.fleet.listen)
    assert activations == defaults, "the file shows the defaults"
    for unit, server in (
        ("bottega-gateway.service", gateway.server),
        ("bottega-worker@.service", worker.server),
        ("bottega-controlnet@.service", net.server),
        ("bottega-loras.service", loras.server),
        ("bottega-cache.service", cache.server),
        ("bottega-activations.service", activations.server),
    ):
        assert float(setting(unit, "TimeoutStopSec")) > server.drain_grace_s

"""What stands in deploy/: systemd takes the units as they are, and the services take the configurations."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bottega.activations.config import ActivationsConfig
from bottega.cache.config import CacheConfig
from bottega.config import KeyPath, keys_of, load, parse
from bottega.controlnet.catalogue import open_catalogue
from bottega.controlnet.config import ControlNetConfig
from bottega.gateway.config import GatewayConfig
from bottega.http.config import HttpConfig
from bottega.loras.config import LoraConfig
from bottega.manifest import ServiceSpec, load_object, read_services
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES
from bottega.model_files.configuration_rules import TEXT_ENCODER_RULES
from bottega.model_files.transformer_rules import SD3_RULES, T5_RULES
from bottega.model_files.unet_rules import UNET_RULES
from bottega.model_files.vae_rules import VAE_RULES
from bottega.process import open_files
from bottega.rpc.security.caller import METHOD_ROLES
from bottega.rpc.server_config import ServerConfig
from bottega.transport.handshake.binding import GROUP_VARIABLE
from bottega.worker.config import WorkerConfig
from tests.unit.house.conftest import RunScript

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
UNITS = sorted(path.name for path in (DEPLOY / "systemd").iterdir())
SERVICES = [name for name in UNITS if name.endswith(".service")]
RUN = "/opt/bottega/run"
# Tenths, of ten whole ones: a service without any hardening has 9.6. What computes reaches the machine's devices.
MOST_EXPOSED = 15
MOST_EXPOSED_ON_DEVICE = 20

MANIFEST = read_services()

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here (Debian: apt install systemd)"
)


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """The units as they are installed, one instance of each template, with a start script that is there."""
    made = []
    for name in UNITS:
        text = (DEPLOY / "systemd" / name).read_text().replace(RUN, str(DEPLOY / "run"))
        made.append(tmp_path / name.replace("@.", "@miniature."))
        made[-1].write_text(text)
    return made


def unit_name(service: ServiceSpec) -> str:
    return f"bottega-{service.kind}{'@' if service.count else ''}.service"


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
@pytest.mark.parametrize("on_device", [False, True])
def test_the_services_may_do_little(installed: list[Path], on_device: bool) -> None:
    names = {
        unit_name(service).replace("@", "@miniature") for service in MANIFEST if service.unit.on_device == on_device
    }
    services = [path for path in installed if path.name in names]
    assert len(services) == len(names)
    most = MOST_EXPOSED_ON_DEVICE if on_device else MOST_EXPOSED
    done = analyze("security", "--no-pager", "--offline=true", f"--threshold={most}", *services)
    assert done.returncode == 0, done.stdout


def test_all_services_of_a_machine_share_a_budget_of_memory_and_keep_their_state_to_themselves() -> None:
    slices = re.findall(r"^Memory(High|Max)=(\d+)%$", (DEPLOY / "systemd" / "bottega.slice").read_text(), re.MULTILINE)
    bounds = {name: int(share) for name, share in slices}
    assert 50 <= bounds["High"] < bounds["Max"] <= 95
    for unit in SERVICES:
        assert setting(unit, "Slice") == "bottega.slice"
        assert setting(unit, "StateDirectoryMode") == "0700"


@pytest.mark.parametrize("unit", ["bottega-worker@.service", "bottega-controlnet@.service"])
def test_what_is_compiled_for_a_device_has_a_place(unit: str) -> None:
    folder, text = setting(unit, "CacheDirectory"), (DEPLOY / "systemd" / unit).read_text()
    assert f"TORCHINDUCTOR_CACHE_DIR=%C/{folder}/" in text
    assert f"TRITON_CACHE_DIR=%C/{folder}/" in text


@pytest.mark.parametrize("unit", SERVICES)
def test_a_service_has_the_time_to_drain_the_files_that_it_needs_and_outlives_its_children(unit: str) -> None:
    assert setting(unit, "Type") == "notify"
    assert float(setting(unit, "TimeoutStopSec")) >= ServerConfig().drain_grace_s + 10
    assert setting(unit, "KillMode") == "mixed", "else systemd ends engines and codecs under a service that drains"
    assert setting(unit, "OOMPolicy") == "continue", "else systemd ends the service with its engine or codec process"
    assert int(setting(unit, "LimitNOFILE")) >= open_files.ENOUGH


@pytest.mark.parametrize(
    ("kind", "stall_s"),
    [("worker", WorkerConfig().start_stall_s), ("controlnet", ControlNetConfig().start_stall_s)],
)
def test_systemd_waits_for_the_first_word_on_a_start_for_longer_than_the_service_does(
    kind: str, stall_s: float
) -> None:
    assert float(setting(f"bottega-{kind}@.service", "TimeoutStartSec")) > stall_s


def test_a_machine_with_workers_only_gets_no_gateway_with_them() -> None:
    target = (DEPLOY / "systemd" / "bottega.target").read_text()
    assert not re.findall(r"^(?:Wants|Requires|BindsTo|After)=", target, re.MULTILINE)
    assert [setting(unit, "WantedBy") for unit in SERVICES] == ["bottega.target"] * len(SERVICES)


def test_every_service_of_the_manifest_has_the_unit_of_the_template(tmp_path: Path, run_script: RunScript) -> None:
    run_script("units.py", tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    there = {name: (DEPLOY / "systemd" / name).read_text() for name in SERVICES}
    assert made == there, "the template or the manifest has changed: run deploy/units.py"


def test_a_configuration_that_cannot_be_used_is_not_tried_again(tmp_path: Path) -> None:
    service = MANIFEST[0]  # all have one template and one way to start
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("colour: red")
    done = _start(service.module, wrong)
    assert done.returncode == int(setting(unit_name(service), "RestartPreventExitStatus"))
    assert f"{service.module}: " in done.stderr
    assert "colour" in done.stderr


def test_a_port_that_is_taken_may_be_free_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = tmp_path / "gateway.yaml"
        config.write_text(f'{{"server": {{"listen": "127.0.0.1:{taken.getsockname()[1]}"}}, "state": "{tmp_path}"}}')
        done = _start("bottega.gateway", config)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "cannot be used" in done.stderr


def _start(module: str, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
    assert f"\ng {setting(unit, 'Group')} " in (DEPLOY / "sysusers" / "bottega.conf").read_text()


def test_the_controlnet_servers_configuration_hosts_the_embedded_models_own(tmp_path: Path) -> None:
    net = load(ControlNetConfig, DEPLOY / "config" / "controlnets" / "miniature.yaml")
    folders = open_catalogue(net, tmp_path)[0].folders
    assert set(folders) == {path.name for path in (WEIGHTS / "controlnets").iterdir()}
    assert all((folder / "config.json").is_file() for folder in folders.values())


def test_configurations_say_of_keys_what_their_docstrings_say(tmp_path: Path, run_script: RunScript) -> None:
    run_script("configurations.py", tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.yaml")}
    there = {path.relative_to(DEPLOY / "config"): path.read_text() for path in (DEPLOY / "config").rglob("*.yaml")}
    assert made == there, "a docstring or a default has changed: run deploy/configurations.py"


# "#key: value", which is a key with its default; "# Words" are a comment.
_DEFAULT = re.compile(r"^( *)#(?! )", re.MULTILINE)


@pytest.mark.parametrize("service", MANIFEST, ids=lambda service: service.kind)
def test_every_key_stands_in_a_services_configuration_with_its_default_and_what_it_is_for(service: ServiceSpec) -> None:
    kind = load_object(service.config)
    file = DEPLOY / "config" / (f"{service.kind}s/miniature.yaml" if service.count else f"{service.kind}.yaml")
    assert load(kind, file) == parse(kind, service.example, source="example")
    text = _DEFAULT.sub(r"\1", file.read_text())
    said = list(keys_of(parse(kind, yaml.safe_load(text), source=str(file))))
    expected = list(keys_of(parse(kind, {}, source="defaults")))
    differing = [(a, b) for a, b in zip(said, expected, strict=True) if a != b and a.path[0] not in service.example]
    assert not differing, "a default has changed: run deploy/configurations.py"
    paths = {key.path for key in expected}
    assert _dotted(yaml.safe_load(text), paths) == paths, "run deploy/configurations.py"
    assert not [key.name for key in expected if not key.explanation], "say in the dataclass's docstring what it is for"


def _dotted(values: dict[str, object], keys: set[KeyPath], section: KeyPath = ()) -> set[KeyPath]:
    found: set[KeyPath] = set()
    for name, value in values.items():
        path = (*section, name)
        found |= _dotted(value, keys, path) if isinstance(value, dict) and path not in keys else {path}
    return found


def test_the_services_take_their_configurations() -> None:
    gateway = load(GatewayConfig, DEPLOY / "config" / "gateway.yaml")
    worker = load(WorkerConfig, DEPLOY / "config" / "workers" / "miniature.yaml")
    assert (worker.name, worker.gateway) == ("miniature", gateway.fleet.listen)
    net = load(ControlNetConfig, DEPLOY / "config" / "controlnets" / "miniature.yaml")
    assert (net.gateway, net.engine.dtype) == (gateway.fleet.listen, worker.engine.dtype)
    loras = load(LoraConfig, DEPLOY / "config" / "loras.yaml")
    assert (loras.gateway, loras.bases) == (gateway.fleet.listen, LoraConfig().bases)
    assert {own.path: own.base for own in loras.loras.values()} == {f"miniature/{name}": "miniature" for name in STYLES}
    assert all((WEIGHTS / "loras" / name).is_dir() for name in STYLES)
    cache = load(CacheConfig, DEPLOY / "config" / "cache.yaml")
    assert cache.gateway == gateway.fleet.listen
    activations = load(ActivationsConfig, DEPLOY / "config" / "activations.yaml")
    assert activations.gateway == gateway.fleet.listen
    http = load(HttpConfig, DEPLOY / "config" / "http.yaml")
    assert http.gateway == gateway.server.listen
    for unit, server in (
        ("bottega-http.service", http.server),
        ("bottega-gateway.service", gateway.server),
        ("bottega-worker@.service", worker.server),
        ("bottega-controlnet@.service", net.server),
        ("bottega-loras.service", loras.server),
        ("bottega-cache.service", cache.server),
        ("bottega-activations.service", activations.server),
    ):
        assert float(setting(unit, "TimeoutStopSec")) > server.drain_grace_s


def test_the_page_says_who_may_call_what_as_the_code_does(tmp_path: Path, run_script: RunScript) -> None:
    page = DEPLOY.parent / "libs/bottega/rpc/security/README.md"
    made = tmp_path / page.name
    made.write_text(page.read_text())
    run_script("method_roles.py", made)
    assert made.read_text() == page.read_text(), "the roles of methods have changed: run deploy/method_roles.py"
    words = set(re.findall(r"\w+", made.read_text()))
    assert not [method for method in METHOD_ROLES if method.rpartition("/")[2] not in words]


def test_the_page_says_which_fields_of_models_are_served_as_the_rules_do(tmp_path: Path, run_script: RunScript) -> None:
    page = DEPLOY.parent / "libs/bottega/model_files/README.md"
    made = tmp_path / page.name
    made.write_text(page.read_text())
    run_script("model_fields.py", made)
    assert made.read_text() == page.read_text(), "a rule has changed: run deploy/model_fields.py"
    tables = {"unet": UNET_RULES, "transformer": SD3_RULES, "vae": VAE_RULES}
    tables |= {"text_encoder": TEXT_ENCODER_RULES, "text_encoder_3": T5_RULES}
    for part, rules in tables.items():
        rows = made.read_text().partition("## Files")[0]  # names the fields of all parts
        rows += made.read_text().partition(f"<!-- {part} begin -->")[2].partition(f"<!-- {part} end -->")[0]
        refused = [rule for rule in rules if not all(map(rule.values.accepts, (None, True, 1, 0.5, "other", [1])))]
        assert not [rule.name for rule in refused if rule.why and f"`{rule.name}`" not in rows]

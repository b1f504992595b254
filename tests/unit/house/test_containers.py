"""deploy/containers: an image, a container and a chart's workload for each service, with configurations that parse."""

from __future__ import annotations

import re
import shutil
import socket
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bottega.config import load
from bottega.manifest import load_object, read_services
from bottega.rpc.address import split
from bottega.rpc.server_config import refused_ports

ROOT = Path(__file__).resolve().parents[3]
CONTAINERS = ROOT / "deploy" / "containers"
CHART = CONTAINERS / "chart"
# bottega-scale starts units of systemd; where containers run, something else starts them.
SERVICES = {service.kind: service for service in read_services() if service.kind != "scale"}
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
TEMPLATE = (CHART / "templates" / "services.yaml").read_text(encoding="utf-8")
# What is in a stage of the Dockerfile, by its name.
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))


def _config(kind: str, folder: Path) -> Any:
    """The configuration of a container at 10.0.0.7."""
    image = dict(re.findall(r"(JOBS|OBJECTS|MODEL)=(\S*)", DOCKERFILE))
    compose: dict[str, str] = COMPOSE["services"][kind].get("environment", {})
    compose = {name: value for name, value in compose.items() if not value.startswith("${")}
    file = folder / "config.yaml"
    text = string.Template((CHART / "config" / f"{kind}.yaml").read_text(encoding="utf-8"))
    file.write_text(text.substitute({**image, **compose, "ADDRESS": "10.0.0.7", "HOSTNAME": f"{kind}-0"}))
    return load(load_object(SERVICES[kind].config), file)


def test_every_service_has_an_image_a_container_and_a_workload() -> None:
    assert set(SERVICES) < set(STAGES)
    assert set(COMPOSE["services"]) - set(SERVICES) == {"postgres", "s3", "bucket"}
    assert list(VALUES["services"]) == list(SERVICES)
    for kind, service in SERVICES.items():
        assert f'ENTRYPOINT ["/opt/bottega/start", "{service.module}", "/etc/bottega/{kind}.yaml"]' in STAGES[kind]
        container = COMPOSE["services"][kind]
        assert container["build"]["target"] == kind
        assert ("DEVICE" in container["build"].get("args", {})) == service.unit.on_device
        assert f"./chart/config/{kind}.yaml:/etc/bottega/{kind}.yaml:ro" in container["volumes"]


@pytest.mark.parametrize("kind", SERVICES)
def test_an_image_has_what_keys_of_its_service_need(kind: str) -> None:
    keys = load_object(SERVICES[kind].config).__dataclass_fields__
    needed = {
        extra for key, extra in (("objects", "s3"), ("jobs", "postgresql"), ("database", "postgresql")) if key in keys
    }
    installed = re.findall(rf'"./services\[{kind},?([a-z0-9,]*)\]"', DOCKERFILE)
    assert needed <= set(",".join(installed).split(","))


@pytest.mark.parametrize("kind", SERVICES)
def test_a_container_opens_the_ports_that_are_named(kind: str, tmp_path: Path) -> None:
    config = _config(kind, tmp_path)
    assert refused_ports(config) == []
    ports = set(VALUES["services"][kind]["ports"].values())
    assert {int(port) for port in re.search(r"^EXPOSE (.*)$", STAGES[kind], re.MULTILINE)[1].split()} == ports  # type: ignore[index]
    links = getattr(config, "links", None) or getattr(getattr(config, "engine", None), "links", None)
    listeners = [config.server.listen, config.server.metrics_listen]
    listeners += [config.fleet.listen] if kind == "gateway" else [links.listen] if links else []
    assert {split(address)[1] for address in listeners} == ports
    # What a service announces has to be its own address.
    announced = (
        listeners if kind == "http" else [address for address in listeners if address != config.server.metrics_listen]
    )
    assert kind == "http" or {split(address)[0] for address in announced} == {"10.0.0.7"}


@pytest.mark.parametrize("kind", SERVICES)
def test_a_container_finds_the_gateway_and_its_probes_its_ports(kind: str, tmp_path: Path) -> None:
    config, service = _config(kind, tmp_path), VALUES["services"][kind]
    gateway = VALUES["services"]["gateway"]["ports"]
    if kind == "http":
        assert (config.gateway, config.fleet) == (f"gateway:{gateway['grpc']}", f"gateway:{gateway['fleet']}")
    elif kind != "gateway":
        assert config.gateway == f"gateway:{gateway['fleet']}"
    assert {service["probe"], "metrics"} <= set(service["ports"])
    assert set(service["open"]) <= set(service["ports"].values())
    grace_s = float(re.search(r"terminationGracePeriodSeconds: (\d+)", TEMPLATE)[1])  # type: ignore[index]
    assert config.server.drain_grace_s < grace_s
    assert COMPOSE["services"][kind]["stop_grace_period"] == f"{grace_s:g}s"


def test_images_install_extras_that_exist() -> None:
    for package, extras in re.findall(r"\./(\w+)\[([\w,]+)\]", DOCKERFILE):
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), package
    for kind in SERVICES:
        assert re.search(rf"^RUN pip install \"\./services\[{kind}\b", STAGES[f"{kind}-build"], re.MULTILINE)
    for source in re.findall(r"^COPY (?!--)(\S+) ", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists()


def test_the_start_of_a_container_puts_in_its_address_and_name(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text("import sys\nprint(open(sys.argv[2]).read())")
    source = tmp_path / "source.yaml"
    source.write_text("name: ${HOSTNAME}\nlisten: ${ADDRESS}:8480\njobs: '${JOBS}'\n")
    done = subprocess.run(
        [sys.executable, CONTAINERS / "start", "served", source],
        env={"PYTHONPATH": str(tmp_path), "BOTTEGA_STATE": str(tmp_path), "JOBS": "postgresql://db/a?b=1&c=2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    name = socket.gethostname()
    assert yaml.safe_load(done.stdout) == {
        "name": name,
        "listen": f"{socket.gethostbyname(name)}:8480",
        "jobs": "postgresql://db/a?b=1&c=2",
    }


def test_compose_keeps_jobs_and_pictures_in_its_own_servers(tmp_path: Path) -> None:
    config, services = _config("gateway", tmp_path), COMPOSE["services"]
    assert config.jobs == f"postgresql://{services['postgres']['environment']['POSTGRES_USER']}@postgres/bottega"
    given = services["gateway"]["environment"]
    assert given["PGPASSWORD"] == services["postgres"]["environment"]["POSTGRES_PASSWORD"]
    assert given["AWS_SECRET_ACCESS_KEY"] == services["s3"]["environment"]["ROOT_SECRET_KEY"]
    assert given["AWS_ENDPOINT_URL"] == f"http://s3{services['s3']['environment']['VGW_PORT']}"
    assert services["bucket"]["command"][-1] == "/data/" + config.objects.removeprefix("s3://").partition("/")[0]


def test_the_template_of_the_chart_uses_values_that_exist() -> None:
    for path in re.findall(r"\$?\.Values((?:\.\w+)+)", TEMPLATE):
        found: Any = VALUES
        for name in path.strip(".").split("."):
            assert name in found, path
            found = found[name]
    used = set(re.findall(r"\$service\.(\w+)", TEMPLATE))
    for kind, service in VALUES["services"].items():
        assert set(service) == used, kind


def test_passwords_reach_only_the_services_that_need_them() -> None:
    conditions: list[str] = []
    given: dict[str, list[str]] = {}
    for line in TEMPLATE.splitlines():
        if opened := re.search(r"{{-? (?:if|range|with) (.*?) }}", line):
            conditions.append(opened[1])
        elif re.search(r"{{-? end }}", line):
            conditions.pop()
        for name in re.findall(r"secretRef|JOBS|OBJECTS|MODEL", line):
            given[name] = conditions[1:]
    gateway = ['eq $name "gateway"']
    assert given == {
        "secretRef": ["$service.secret"],
        "JOBS": gateway,
        "OBJECTS": gateway,
        "MODEL": ['eq $name "worker"'],
    }
    secrets = re.compile("PASSWORD|SECRET|ACCESS_KEY|JOBS|OBJECTS")
    holders = {
        name
        for name, container in COMPOSE["services"].items()
        if secrets.search(" ".join(container.get("environment", {})))
    }
    assert holders == {"gateway", "postgres", "s3"}


@pytest.mark.skipif(not shutil.which("helm"), reason="there is no helm here: the chart was not rendered")
def test_helm_renders_the_chart() -> None:
    command = ["helm", "template", "trial", str(CHART), "--set", "services.gateway.secret=passwords"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    sets = [document for document in yaml.safe_load_all(done.stdout) if document and document["kind"] == "StatefulSet"]
    assert len(sets) == len(SERVICES)
    containers = [document["spec"]["template"]["spec"]["containers"][0] for document in sets]
    assert [container["name"] for container in containers if "envFrom" in container] == ["gateway"]

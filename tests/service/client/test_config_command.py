"""`bottega config`: checks a file, and shows every key with where its value came from."""

from __future__ import annotations

import grp
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.rpc.security.tenant_file import GROUP
from tests.support.other_user import needs_root
from tests.support.tenants import add_tenant
from tests.support.terminal import run


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """The configuration of the unit bottega-worker@left, in a folder as /etc/bottega."""
    file = tmp_path / "workers" / "left.yaml"
    file.parent.mkdir()
    file.write_text("name: left\nengine:\n  max_rows: 4\n")
    return file


def test_a_key_of_an_earlier_version_is_answered_with_its_new_name(tmp_path: Path) -> None:
    file = tmp_path / "controlnet.yaml"
    file.write_text("start_s: 900\n")
    done = run("config", "check", file, "--service", "controlnet")
    assert done.exit_code == 1
    assert "start_s: is called start_stall_s now" in done.output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("server: {listen: '0.0.0.0:8470'}", "server.listen 0.0.0.0:8470 can be reached"),
        ("server: {listen: localhost}", "server.listen: Value error, 'localhost' is not an address"),
    ],
)
def test_a_port_that_the_service_would_not_open_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    done = run("config", "check", file)
    assert (done.exit_code, named in done.output) == (1, True), done.output
    file.write_text("server: {listen: '0.0.0.0:8470', insecure: true}")
    assert run("config", "check", "--no-ports", file).output == f"{file}: a gateway can use it; it sets 2 keys\n"


@pytest.mark.parametrize(
    ("service", "text", "named"),
    [
        ("gateway", "tenants: {folder}/tenants.json", "tenants: {folder}/tenants.json is not there"),
        (
            "cache",
            "server: {{tls: {{certificate: {folder}/a.pem, key: {folder}/a.key, authority: {folder}/b.pem}}}}",
            "server.tls: {folder}/a.pem is not there",
        ),
        ("loras", "bases: {{sdxl: {folder}}}", "bases.sdxl: {folder} is not a model in Diffusers' layout"),
        ("loras", "loras: {{ink: {{path: a, base: b}}}}", "loras.ink.base: b is not in bases"),
    ],
)
def test_what_a_start_would_not_find_is_named(tmp_path: Path, service: str, text: str, named: str) -> None:
    file = tmp_path / f"{service}.yaml"
    file.write_text(text.format(folder=tmp_path))
    done = run("config", "check", "--no-ports", file)
    assert (done.exit_code, named.format(folder=tmp_path) in " ".join(done.output.split())) == (1, True), done.output


def test_a_port_in_use_is_named_with_who_uses_it_unless_that_is_the_service_itself(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        file.write_text(f"server: {{listen: '{address}'}}\n")
        done = run("config", "check", file)
        said = " ".join(done.output.split())
        assert (done.exit_code, f"server.listen {address} is in use by process {os.getpid()} (" in said) == (1, True)
        assert run("config", "check", file, "--no-ports").exit_code == 0
    listening = (
        "import socket, sys; held = socket.create_server(('127.0.0.1', 0)); print(held.getsockname()[1]); input()"
    )
    words = [sys.executable, "-uc", listening, "bottega.cache", "--config", str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cache:
        assert cache.stdin is not None
        assert cache.stdout is not None
        file.write_text(f"server: {{listen: '127.0.0.1:{int(cache.stdout.readline())}'}}\n")
        assert run("config", "check", file).exit_code == 0
        cache.stdin.close()


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of / with the shipped unit of the gateway, whose group this machine has."""
    units = tmp_path / "etc/systemd/system"
    monkeypatch.setattr("bottega.client.cli.config._UNITS", units)
    units.mkdir(parents=True)
    (tmp_path / "etc/bottega").mkdir()
    shipped = Path(__file__).resolve().parents[3] / "deploy/systemd/bottega-gateway.service"
    text = shipped.read_text().replace(f"Group={GROUP}", f"Group={grp.getgrgid(1).gr_name}")
    (units / shipped.name).write_text(text)
    return tmp_path


@needs_root
def test_a_file_that_the_units_user_cannot_read_is_named(units: Path) -> None:
    """pytest's folders are for their owner alone, so that nothing in them can be read by a unit."""
    file, tenants = units / "etc/bottega/gateway.yaml", units / "etc/bottega/tenants.json"
    add_tenant(tenants, "shop")
    file.write_text(f"tenants: {tenants}\n")
    (units / "etc/systemd/system/bottega-gateway.service.d").mkdir()
    drop_in = units / "etc/systemd/system/bottega-gateway.service.d/override.conf"
    drop_in.write_text("[Service]\nPrivateTmp=no\n")
    done = run("config", "check", "--no-ports", file)
    said = " ".join(done.output.split())
    assert (done.exit_code, f"as the user of bottega-gateway.service: tenants: {tenants} cannot be read" in said) == (
        1,
        True,
    ), said
    assert os.geteuid() == 0
    drop_in.write_text("[Service]\nPrivateTmp=no\nUser=root\n")
    assert run("config", "check", "--no-ports", file).exit_code == 0


@needs_root
def test_a_file_in_a_folder_that_the_unit_does_not_see_is_named(units: Path) -> None:
    file = units / "etc/bottega/gateway.yaml"
    file.write_text("server: {audit: /home/anna/audit.jsonl}\n")
    done = run("config", "check", "--no-ports", file)
    said = " ".join(done.output.split())
    assert "server.audit: /home/anna/audit.jsonl is in a folder that bottega-gateway.service cannot see" in said


@needs_root
def test_a_unit_whose_group_is_not_there_is_named_and_one_of_another_machine_is_not_looked_at(
    units: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, unit = units / "etc/bottega/gateway.yaml", units / "etc/systemd/system/bottega-gateway.service"
    file.write_text("{}\n")
    unit.write_text("[Service]\nDynamicUser=yes\nGroup=no-such-group\n")
    done = run("config", "check", "--no-ports", file)
    said = " ".join(done.output.split())
    assert (done.exit_code, "the user or group" in said) == (1, True)
    monkeypatch.undo()
    assert run("config", "check", "--no-ports", file).exit_code == 0


def test_a_file_with_any_name_is_checked_for_the_service_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("policy: lru\n")
    assert run("config", "check", file, "--service", "cache").exit_code == 0
    assert run("config", "check", file, "--service", "gateway").exit_code == 1
    done = run("config", "check", file)
    assert (done.exit_code, "--service KIND" in done.output) == (2, True)
    done = run("config", "check", file, "--service", "clock")
    assert (done.exit_code, "Kinds: gateway, loras" in done.output) == (2, True)
    done = run("config", "check", tmp_path / "gateway.yaml")
    assert (done.exit_code, "cannot be read" in done.output) == (1, True), "it is no empty one"


def shown(*arguments: object) -> dict[str, list[str]]:
    """Return the rows of the table by key: value and origin."""
    done = run("config", "show", *arguments)
    assert done.exit_code == 0, done.output
    # A value that is a list has single blanks in it.
    rows = [re.split(r"\s{2,}", row.strip()) for row in done.output.splitlines() if row.strip()]
    return {key: cells for key, *cells in rows}


def test_a_units_configuration_is_shown_with_the_lines_that_set_it(worker: Path) -> None:
    rows = shown("worker@left", "--folder", worker.parents[1])
    assert rows["name"] == ["left", f"{worker}, line 1"]
    assert rows["engine.max_rows"] == ["4", f"{worker}, line 3"]
    assert [part.strip() for part in rows["engine.device"]] == ["auto", "default"]


def test_secrets_are_masked(tmp_path: Path) -> None:
    (tmp_path / "cache.yaml").write_text("profiles: ['https://me:hush@host/a.json']\n")
    done = run("config", "show", "cache", "--folder", tmp_path)
    assert ("hush" in done.output, "https://****" in done.output) == (False, True)

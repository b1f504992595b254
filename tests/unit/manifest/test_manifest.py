"""Which services a suite has, by its manifest and by those of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.manifest import VARIABLE, load_object, options_of, read_services

OWN = ["gateway", "loras", "cache", "activations", "worker", "controlnet", "http", "scale"]
SPEC = """
from bottega.manifest import ServiceOption, ServiceSpec
SPEC = ServiceSpec(kind={kind!r}, title="t", module="m", configure=lambda suite, name: {{}},
                   count=ServiceOption(name={option!r}, help="How many.", default=1))
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest of somebody else's services, empty as yet, whose modules lie beside it."""
    manifest = tmp_path / "services.txt"
    monkeypatch.setenv(VARIABLE, str(manifest))
    monkeypatch.syspath_prepend(str(tmp_path))
    return manifest


def listed(manifest: Path, name: str, text: str) -> None:
    """One more service: a module, and its line in the manifest."""
    module = f"other_{manifest.parent.name.replace('-', '_')}_{name}"
    (manifest.parent / f"{module}.py").write_text(text)
    with manifest.open("a") as file:
        file.write(f"{module}  # somebody's\n")
    sys.modules.pop(module, None)


def test_the_suites_own_services_come_in_the_order_of_the_manifest() -> None:
    assert [service.kind for service in read_services()] == OWN
    assert [option.name for option in options_of(read_services())] == ["workers", "controlnet_servers"]


def test_services_of_others_come_after_them(others: Path) -> None:
    listed(others, "clock", SPEC.format(kind="clock", option="clocks"))
    services = read_services()
    assert [service.kind for service in services] == [*OWN, "clock"]
    assert services[-1].names({"clocks": 2}) == ["clock-0", "clock-1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_that_name", "cannot be imported"),
        (SPEC.format(kind="worker", option="clocks"), "another service has it"),
        (SPEC.format(kind="Clock/..", option="clocks"), "is not a valid kind"),
        (SPEC.format(kind="clock", option="workers"), "has the option workers already"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_with_its_number(others: Path, text: str, said: str) -> None:
    others.write_text("# a manifest\n")
    listed(others, "bad", text)
    with pytest.raises(ConfigError) as refused:
        read_services()
    assert f"{others}, line 2" in refused.value.message
    assert said in refused.value.message


def test_what_a_spec_names_must_be_there() -> None:
    assert load_object("bottega.manifest:read_services") is read_services
    for wrong in ("bottega.manifest:nothing", "bottega.nothing:create", "bottega.manifest", ""):
        with pytest.raises(ConfigError, match="cannot be imported"):
            load_object(wrong)


def test_configurations_are_checked_where_their_services_are_not_installed() -> None:
    program = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("diffusers", "faiss", "numpy", "obstore", "psycopg", "sklearn", "torch"):
            raise ImportError(name)
sys.meta_path.insert(0, NotInstalled())
from bottega.manifest import load_object, read_services
for service in read_services():
    for name in filter(None, (service.config, service.config_check)):
        load_object(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

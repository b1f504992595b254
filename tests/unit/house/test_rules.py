"""The rules of the house that no linter checks. Reads the tree; starts nothing but git."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DISTRIBUTIONS = ("protos", "libs", "libs/serving", "libs/weights", "services", "kernels")
SERVICES = sorted(path.name for path in (ROOT / "services" / "bottega").iterdir() if (path / "__init__.py").exists())


def _project(distribution: str) -> dict[str, object]:
    project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    return project


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match.group().lower().replace("_", "-")


def _requirements() -> set[str]:
    found = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if not line.startswith("#")]
    for distribution in DISTRIBUTIONS:
        project = _project(distribution)
        extras = project.get("optional-dependencies", {})
        assert isinstance(extras, dict)
        for group in (project["dependencies"], *extras.values()):
            assert isinstance(group, list)
            found += group
    return {_name(line) for line in found}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_namespace_has_no_init(distribution: str) -> None:
    assert not (ROOT / distribution / "bottega" / "__init__.py").exists(), "it would hide the other distributions"


def test_generated_stubs_are_not_in_git() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "protos/bottega/v1"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    ).stdout.split()
    assert any(path.endswith(".proto") for path in tracked)
    assert not [path for path in tracked if "_pb2" in path]


def test_every_requirement_is_pinned_to_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if re.fullmatch(r"[A-Za-z0-9._-]+==[^\s;]+", line)}
    ours = {str(_project(distribution)["name"]) for distribution in DISTRIBUTIONS}
    assert _requirements() - ours - pinned == set()
    assert "torch==2.13.0" in lines, "without a local version, so that the CPU and the CUDA builds both satisfy it"


def test_the_distributions_share_one_version() -> None:
    assert len({str(_project(distribution)["version"]) for distribution in DISTRIBUTIONS}) == 1


def test_every_distribution_is_for_the_same_pythons() -> None:
    assert {str(_project(distribution)["requires-python"]) for distribution in DISTRIBUTIONS} == {">=3.11,<3.14"}


def test_the_services_have_what_the_libraries_wheel_leaves_out() -> None:
    found = {
        name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
        for name in ("libs", "libs/serving")
    }
    assert found["libs"]["exclude"] == found["libs/serving"]["include"]
    assert "bottega-serving" in _project("services")["dependencies"]  # type: ignore[operator]


def test_every_service_is_built_alike() -> None:
    assert SERVICES, "no service found"
    for service in SERVICES:
        folder = ROOT / "services" / "bottega" / service
        missing = [name for name in ("__main__.py", "config.py") if not (folder / name).exists()]
        missing += [] if list(folder.rglob("*service.py")) else ["service.py"]
        assert not missing, f"{service} has no {missing}"
        assert service in _project("services")["optional-dependencies"], f"{service} has no extra"  # type: ignore[operator]


def test_contributing_maps_every_package_and_nothing_else() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text.split("## Map", 1)[1].split("```", 2)[1]
    mapped = {line.split()[0] for line in block.splitlines() if re.match(r"[a-z.]+/", line)}
    assert not [path for path in mapped if not (ROOT / path).exists()]
    packages = {
        f"{root}/bottega/{path.parent.name}/"
        for root in ("libs", "services", "kernels")
        for path in (ROOT / root / "bottega").glob("*/__init__.py")
    }
    assert packages <= mapped


def test_what_pages_link_to_is_there() -> None:
    pages = [page for page in ROOT.rglob("*.md") if not {".venv", "out", "build"} & {*page.relative_to(ROOT).parts}]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
    assert len(pages) > 5


def test_the_picture_of_the_services_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "deploy" / "architecture.py"))["svg"]()
    assert (ROOT / "deploy" / "architecture.svg").read_text() == drawn, "python deploy/architecture.py draws it again"
    for service in SERVICES:
        assert f">{service}</text>" in drawn

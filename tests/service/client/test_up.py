"""`bottega up` for real: a gateway and a worker of the embedded model, as a newcomer starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import psutil
import pytest

from bottega.client.instance import InstanceRecord, StateFolder
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, Placed, SceneLayout, Thing, draw_edges

BOTTEGA = [sys.executable, "-m", "bottega.client.cli"]

# A worker of the miniature is warm in 7 s with free cores; tests share theirs.
START_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """A `bottega up` in the foreground, and what it printed."""

    process: subprocess.Popen[bytes]
    state: StateFolder
    printed: Path

    def record(self) -> InstanceRecord:
        found = self.state.read()
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        members: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return members


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    state = StateFolder(folder / "state")
    printed = folder / "printed"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [*BOTTEGA, "up", "--port", "0", "--threads", "1", "--device", "cpu", "--state", str(state.root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    started = Up(process=process, state=state, printed=printed)
    try:
        until(lambda: "Ready after" in printed.read_text() or process.poll() is not None, START_S, printed)
        assert process.poll() is None, printed.read_text()
        yield started
    finally:
        process.terminate()
        process.wait(30)


def bottega(up: Up, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BOTTEGA_STATE": str(up.state.root)}
    environment.pop("BOTTEGA_ADDRESS", None)
    environment.pop("BOTTEGA_FLEET", None)
    return subprocess.run(
        [*BOTTEGA, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment
    )


def _job_ids(up: Up) -> list[str]:
    listed = bottega(up, "jobs")
    assert listed.returncode == 0, listed.stderr
    return re.findall(r"\b[0-9a-f]{24}\b", listed.stdout)


def test_a_newcomer_draws_a_picture_and_draws_it_again(up: Up, tmp_path: Path) -> None:
    drawn = bottega(up, "generate", "a big red star", "-o", "star.png", "--seed", "7", "--steps", "4", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert "star.png  64x64  seed 7" in drawn.stdout
    assert "denoise" in drawn.stdout
    again = bottega(up, "generate", "--like", "star.png", "-o", "again.png", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    with PIL.Image.open(tmp_path / "star.png") as first, PIL.Image.open(tmp_path / "again.png") as second:
        assert first.tobytes() == second.tobytes()


def test_a_newcomer_draws_with_a_control_image_at_once(up: Up, tmp_path: Path) -> None:
    star = Thing(shape="star", colour="red")
    draw_edges(SceneLayout(placed=(Placed(thing=star, x=0.7, y=0.5, radius=0.24),), ground="blue")).save(
        tmp_path / "e.png"
    )
    control = ["--control", "edges=e.png:0.8", "--steps", "4", "--seed", "2"]
    drawn = bottega(up, "generate", "a big red star on a blue background", *control, "-o", "star.png", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert "control edges: by controlnet-0, scale 0.8, waited" in drawn.stdout
    assert "ControlNets ran beside" in drawn.stdout
    profiled = bottega(up, "controlnets", "profile", "edges", "--steps", "20")
    assert profiled.returncode == 0, profiled.stderr
    found = re.match(r"edges: (0\.\d+) from step to step, of 20; controlnet-0 will remember it", profiled.stdout)
    assert found
    assert 0.99 < float(found[1]) < 1.0, "the embedded model's own are alike from step to step"
    listed = bottega(up, "controlnets")
    assert {line.split()[0] for line in listed.stdout.splitlines() if "miniature" in line} == {"edges", "layout"}
    assert found[1] in listed.stdout
    assert "edges" in bottega(up, "fleet", "--once").stdout
    assert "engine ready" in bottega(up, "logs", "controlnet-0").stdout


def test_a_newcomer_draws_with_the_models_own_loras_at_once(up: Up, tmp_path: Path) -> None:
    listed = bottega(up, "loras")
    assert listed.returncode == 0, listed.stderr
    assert {line.split()[0] for line in listed.stdout.splitlines() if "miniature" in line} == set(STYLES)
    drawing = ["generate", "a big red star", "--steps", "4", "--seed", "2", "-o"]
    one, other = list(STYLES)[:2]
    drawn = bottega(up, *drawing, "styled.png", "--lora", f"{one}:0.8", "--lora", other, cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    for style in STYLES:
        added = bottega(up, "loras", "add", f"my/{style}", str(WEIGHTS / "loras" / style))
        assert added.returncode == 0, added.stderr
    again = bottega(up, *drawing, "again.png", "--lora", f"my/{one}:0.8", "--lora", f"my/{other}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    plain = bottega(up, *drawing, "plain.png", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    pixels = [PIL.Image.open(tmp_path / f"{name}.png").tobytes() for name in ("styled", "again", "plain")]
    assert pixels[0] == pixels[1] != pixels[2]


def test_the_doctor_finds_a_healthy_suite(up: Up) -> None:
    checked = bottega(up, "doctor")
    assert checked.returncode == 0, checked.stdout
    assert f"the gateway at {up.record().address} serves" in checked.stdout
    assert "1 joined, for miniature" in checked.stdout
    assert "1 ControlNet server joined, with edges, layout" in checked.stdout


def test_a_killed_gateway_is_started_again_and_knows_its_jobs(up: Up, tmp_path: Path) -> None:
    drawn = bottega(up, "generate", "a star", "-o", "star.png", "--steps", "2", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    listed = _job_ids(up)
    served = up.printed.read_text().count("gateway      serves")
    os.kill({child.name: child.pid for child in up.record().children}["gateway"], signal.SIGKILL)
    until(lambda: up.printed.read_text().count("gateway      serves") > served, START_S, up.printed)
    assert _job_ids(up) == listed != []
    drawn = bottega(up, "generate", "a star", "-o", "other.png", "--steps", "2", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr


def test_ctrl_c_leaves_nothing(up: Up) -> None:
    family = up.family()
    assert len(family) >= 3
    os.kill(up.process.pid, signal.SIGINT)
    assert up.process.wait(20) == 0
    assert [member for member in family if member.is_running()] == []
    assert up.printed.read_text().endswith("Stopped; nothing is left running.\n")
    assert not up.state.is_held()
    assert bottega(up, "models").returncode == 1


def test_a_suite_in_the_background_that_does_not_start_says_why(tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = ["--port", "0", "--controlnet-servers", "0", "--device", "abacus", "--state", str(state)]
    failed = subprocess.run(
        [*BOTTEGA, "up", "--detach", *options], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert failed.returncode == 1
    assert "worker-0 does not start" in failed.stderr
    assert "bottega doctor" in failed.stderr
    assert not StateFolder(state).is_held()


def test_a_folder_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [*BOTTEGA, "up", "--model", str(tmp_path), "--state", str(state)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert refused.returncode == 1
    assert "model_index.json" in refused.stderr
    assert not state.exists()


def until(true: Callable[[], bool], timeout_s: float, printed: Path) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, printed.read_text()
        time.sleep(0.05)

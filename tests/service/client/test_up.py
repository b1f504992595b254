"""`bottega up` for real: the suite of the embedded model as newcomers start it, with a service of another manifest."""

from __future__ import annotations

import os
import queue
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import PIL.Image
import pytest
from click.testing import CliRunner

from bottega import kinds
from bottega.client import Client, FleetMember, Readiness
from bottega.client.cli import main
from bottega.errors import BottegaError
from bottega.manifest import VARIABLE
from bottega.miniature.scenes import STYLES, Placed, SceneLayout, Thing, draw_edges
from bottega.transport import (
    Connection,
    Incoming,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    ServiceOffer,
    number_message,
    read_number,
)
from tests.added_service.calls import ASK, COLOURS
from tests.added_service.service_spec import KIND
from tests.support.offers import ask_offer
from tests.support.running_up import START_S, Up, running_up
from tests.support.services import runs
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    environment = {
        VARIABLE: str(ROOT / "tests" / "added_service" / "services.txt"),
        # A user would have installed it.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    options = ("--threads", 1, "--device", "cpu")
    with running_up(tmp_path_factory.mktemp("up"), *options, environment=environment) as up:
        yield up


@pytest.fixture(scope="module")
def client(up: Up) -> Iterator[Client]:
    with Client(up.record().address, fleet_address=up.record().fleet_address) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bottega(up: Up, *arguments: str, status: int = 0) -> str:
    """What a command prints, as in a terminal that knows nothing but where the suite keeps its state."""
    names = (VARIABLE, "BOTTEGA_STATE", "BOTTEGA_ADDRESS", "BOTTEGA_FLEET")
    done = CliRunner().invoke(main, arguments, env={name: up.environment.get(name) for name in names})
    assert done.exit_code == status, done.output
    return done.stdout


def _job_ids(up: Up) -> list[str]:
    return re.findall(r"\b[0-9a-f]{24}\b", bottega(up, "jobs"))


def test_a_service_of_another_manifest_starts_with_the_suite_and_joins(up: Up) -> None:
    assert "1 store of colours" in up.printed.read_text()
    assert f"{KIND:<12} serves at" in up.printed.read_text()
    listed = bottega(up, "fleet", "--once")
    assert KIND in listed
    assert "blue (not loaded)" in listed
    assert "joined the fleet" in bottega(up, "logs", KIND)


def member_of(client: Client, kind: str) -> FleetMember:
    """The one of this kind, as the gateway knows it."""
    (member,) = (member for member in client.fleet().members if member.kind == kind)
    return member


def test_what_a_job_names_is_loaded_before_it_runs(client: Client) -> None:
    client.generate("a red star", num_inference_steps=2, seed=1)

    def loaded() -> set[str]:
        return {item.name for item in member_of(client, KIND).load.hosted if item.readiness is Readiness.LOADED}

    wait_until(lambda: loaded() == {"red"}, "what the job named")


def test_a_workers_engine_has_its_add_on_and_is_told_of_the_stores(client: Client) -> None:
    for prompt, named in (("a green star", True), ("a star", False)):
        drawn = client.generate(prompt, num_inference_steps=2, seed=1)
        assert (KIND in {time.stage for time in drawn.provenance.times}) == named


class _Answers(LinkClientHandler):
    """Asks for nothing by itself, and keeps what is answered."""

    def __init__(self) -> None:
        self.answers: queue.Queue[int] = queue.Queue()

    @property
    def wants_link(self) -> bool:
        return True

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            self.answers.put(read_number(incoming.layout, connection.wait_all(incoming)))

    def on_end(self, cause: BottegaError) -> None:
        """The test ends it."""


def test_it_answers_over_a_link(client: Client) -> None:
    def offered(link_id: str) -> Future[ServiceOffer]:
        found: Future[ServiceOffer] = Future()
        found.set_result(ask_offer(member_of(client, KIND).address, KIND, link_id=link_id))
        return found

    handler = _Answers()
    link = LinkClient(
        handler, peer="the store of colours", request=offered, settings=LinkClientSettings(), counters=LinkCounters()
    )
    link.connection.send(number_message(ASK, list(COLOURS).index("green")))
    link.start()
    try:
        assert handler.answers.get(timeout=60) == COLOURS["green"]
    finally:
        link.close()
        link.join()


def test_a_newcomer_draws_a_picture_and_draws_it_again(up: Up, folder: Path) -> None:
    drawn = bottega(up, "generate", "a big red star", "-o", "star.png", "--seed", "7", "--steps", "4")
    assert "star.png  64x64  seed 7" in drawn
    assert "denoise" in drawn
    bottega(up, "generate", "--like", "star.png", "-o", "again.png")
    with PIL.Image.open(folder / "star.png") as first, PIL.Image.open(folder / "again.png") as second:
        assert first.tobytes() == second.tobytes()


def test_a_newcomer_draws_with_a_control_image_at_once(up: Up, folder: Path) -> None:
    star = Thing(shape="star", colour="red")
    draw_edges(SceneLayout(placed=(Placed(thing=star, x=0.7, y=0.5, radius=0.24),), ground="blue")).save(
        folder / "e.png"
    )
    control = ["--control", "edges=e.png:0.8", "--steps", "4", "--seed", "2"]
    drawn = bottega(up, "generate", "a big red star on a blue background", *control, "-o", "star.png")
    assert "control edges: by controlnet-0, scale 0.8, waited" in drawn
    assert "ControlNets ran during" in drawn
    profiled = bottega(up, "controlnets", "profile", "edges", "e.png", "--prompt", "a big red star", "--steps", "20")
    found = re.match(r"edges: cosine (0\.\d+) from step to step, with 20 steps; kept by controlnet-0", profiled)
    assert found
    assert 0.99 < float(found[1]) < 1.0, "the embedded model's own are alike from step to step"
    # The gateway knows what the server remembers from its next beat on.
    wait_until(lambda: found[1] in bottega(up, "controlnets"), "the profile to be listed")
    listed = bottega(up, "controlnets")
    assert {line.split()[0] for line in listed.splitlines() if "miniature" in line} == {"edges", "layout"}
    assert "engine ready" in bottega(up, "logs", "controlnet-0")


def test_a_worker_tells_the_fleet_what_is_in_its_weights_and_what_a_swap_takes(client: Client) -> None:
    style = next(iter(STYLES))
    client.generate("a big red star", lora=[(style, 0.7)], seed=3, num_inference_steps=50)
    told = [(client.lora(style).digest, 0.7)]
    wait_until(lambda: _in_weights(client) == told, "the set to be told")
    assert 0 < member_of(client, kinds.WORKER).load.switch_times[kinds.LORAS] < 1.0
    client.generate("a big red star", seed=3, num_inference_steps=6)
    wait_until(lambda: _in_weights(client) == [], "the weights to be told as untouched")


def _in_weights(client: Client) -> list[tuple[str, float]]:
    hosted = member_of(client, kinds.WORKER).load.hosted
    return [(lora.digest, lora.scale) for lora in hosted if lora.readiness is Readiness.APPLIED]


def test_the_doctor_finds_a_healthy_suite(up: Up) -> None:
    checked = bottega(up, "doctor")
    assert f"the gateway at {up.record().address} serves" in checked
    assert "1 worker joined, for miniature" in checked
    assert "1 ControlNet server joined, with edges, layout" in checked
    assert "1 LoRA store joined" in checked
    assert "approximate cache cache joined, with" in checked
    assert "1 store of colours joined" in checked


def test_a_killed_gateway_is_started_again_and_knows_its_jobs(up: Up, folder: Path) -> None:
    bottega(up, "generate", "a star", "-o", "star.png", "--steps", "2")
    listed = _job_ids(up)
    served = up.printed.read_text().count("gateway      serves")
    os.kill({child.name: child.pid for child in up.record().children}["gateway"], signal.SIGKILL)
    again = lambda: up.printed.read_text().count("gateway      serves") > served  # noqa: E731
    wait_until(again, "the gateway to serve again", within_s=START_S)
    assert _job_ids(up) == listed != []
    bottega(up, "generate", "a star", "-o", "other.png", "--steps", "2")


def test_ctrl_c_leaves_nothing(up: Up) -> None:
    family = up.family()
    assert len(family) >= 3
    os.kill(up.process.pid, signal.SIGINT)
    assert up.process.wait(60) == 0
    assert [member for member in family if runs(member)] == []
    assert up.printed.read_text().endswith("Stopped; nothing is left running.\n")
    assert not up.state.is_held()

"""The command's tables at 80 columns, `bottega top`, and the fleet as the SDK returns it."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

import pytest
from rich.console import Console

from bottega import kinds
from bottega.client.checkup.gateway import _check_accelerations
from bottega.client.cli.fleet import FleetRates, Rates, accelerations_table, fleet_table, top_table
from bottega.client.cli.jobs import jobs_table
from bottega.client.cli.models import models_table
from bottega.client.cli.scale import demand_table
from bottega.client.cli.terminal import PlainTable, print_table
from bottega.client.types.fleet import FleetStatus, fleet_from, member_from
from bottega.client.types.jobs import status_from
from bottega.client.types.models import model_from
from bottega.v1.fleet_pb2 import (
    Acceleration,
    Activity,
    Demand,
    ListMembersResponse,
    Load,
    Member,
    Registration,
    RunningAttempt,
    StartProgress,
)
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted, LeftOut
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED, Job, Model

_PROMPT = "a big red star on the left, a small green circle at the bottom"
_HOSTED = tuple(Hosted(kind="controlnet", name=name, state=HOSTED_STATE_LOADED) for name in ("edges", "depth", "pose"))


def _fleet() -> FleetStatus:
    member = Member(
        registration=Registration(kind="worker", name="worker-0", address="127.0.0.1:43210", device="cuda:0 H200"),
        load=Load(
            hosted=_HOSTED,
            memory_bytes=357 << 20,
            start_s=12.5,
            accelerations=[
                Acceleration(name="kernels.geglu", kept=True, speedup=1.2, difference=1e-3, reason="word " * 9)
            ],
            activity=Activity(completed=1, steps=9, turns=3, lookups=2, hits=1),
        ),
        joined_s=4000.0,
    )
    member.registration.models.add(name="bottega-shapes")
    scaler = Member(registration=Registration(kind="scale", name="host-1"))
    demand = Demand(kind="worker", model="bottega-shapes", desired=7, waiting=9, waiting_s=12.5)
    return fleet_from(ListMembersResponse(members=[member, member, scaler], demand=[demand]))


def _jobs() -> PlainTable:
    job = Job(
        job_id="f" * 32, state=JOB_STATE_COMPLETED, spec=GenerationSpec(prompt=_PROMPT), steps_done=9, steps_total=9
    )
    job.create_time.FromSeconds(1_800_000_000)
    job.start_time.FromSeconds(1_800_000_000)
    job.end_time.FromSeconds(1_800_000_001)
    return jobs_table((status_from(job),))


def _models() -> PlainTable:
    model = Model(name="bottega-shapes", workers=1, dtype="float32", model_hash="a" * 64, default_steps=50)
    model.default_width = model.default_height = 1024
    model.default_guidance_scale = 7.5
    return models_table([model_from(model)])


def _lines(table: PlainTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(table)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        (_jobs(), ("f" * 32, "completed", *_PROMPT.split())),
        (fleet_table(_fleet()), ("worker-0", "127.0.0.1:43210", "bottega-shapes,", "edges,", "pose")),
        (fleet_table(_fleet(), starts=True), ("worker-0", "127.0.0.1:43210", "12.5 s")),
        (accelerations_table(_fleet()), ("kernels.geglu", "yes", "1.20")),
        (top_table(_fleet(), FleetRates()), ("worker-0", "done/min", "failed/min")),
        (demand_table(_fleet()), ("bottega-shapes", "worker", "7", "12.5", "scaled", "host-1")),
        (_models(), ("bottega-shapes", "1024x1024", "guidance")),
    ],
    ids=["jobs", "fleet", "fleet -v", "accelerations", "top", "scale", "models"],
)
def test_a_table_fits_80_columns_and_cuts_nothing(
    table: PlainTable, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(table, monkeypatch, capsys)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in text
    assert [word for word in kept if word not in text] == []


def worker(name: str, *found: Acceleration) -> Member:
    return Member(registration=Registration(kind="worker", name=name, device="cuda:0"), load=Load(accelerations=found))


def test_a_worker_that_starts_says_how_far_it_is() -> None:
    starting = worker("w0")
    starting.load.starting.MergeFrom(
        StartProgress(stage="loading unet", done_bytes=3_100_000_000, total_bytes=5_140_000_000)
    )
    serves = fleet_table(fleet_from(ListMembersResponse(members=[starting]))).table.columns[3]
    assert list(map(str, serves.cells)) == ["starting: loading unet, 3.1 of 5.1 GB"]


KEPT = Acceleration(name="kernels.geglu", kept=True, speedup=1.234, difference=1.5e-3, tolerance=0.02)
SLOW = Acceleration(name="graphs", speedup=0.97, difference=2e-7, reason="it is 0.97 times as fast here")


def test_doctor_names_what_a_worker_computes_by_and_warns_of_one_that_kept_nothing() -> None:
    kept, none = _check_accelerations(map(member_from, (worker("w0", KEPT, SLOW), worker("w1", SLOW), worker("w2"))))
    assert kept.what == "w0 on cuda:0 uses kernels.geglu (1.23 x); 1 more are off"
    assert "w1 on cuda:0 uses none of 1 tested accelerations" in none.what
    assert none.todo == "bottega fleet -v says why."


def controlnet_server(*hosted: Hosted, left_out: Mapping[str, str]) -> Member:
    items = [LeftOut(kind="controlnet", name=name, reason=reason) for name, reason in left_out.items()]
    registration = Registration(kind="controlnet", name="controlnet-0")
    return Member(registration=registration, load=Load(hosted=hosted, left_out=items))


def test_what_is_left_out_and_what_fits_no_model_stands_below_the_table() -> None:
    drawing = worker("w0")
    drawing.registration.models.add(name="sdxl", base="4/8 2048+1280")
    bases = {"canny": "4/8 2048+1280", "sd15": "x"}
    nets = [Hosted(kind="controlnet", name=name, base=base) for name, base in bases.items()]
    server = controlnet_server(*nets, left_out={"depth": "it has no config.json"})
    fleet = ListMembersResponse(members=[drawing, server])
    assert str(fleet_table(fleet_from(fleet)).table.caption).splitlines() == [
        "0 waiting in the queue",
        "controlnet-0 does not serve depth: it has no config.json",
        "controlnet-0 does not serve sd15: it fits no served model: its shapes are x, theirs 4/8 2048+1280",
    ]


def member(kind: str, name: str, activity: Activity, **load: object) -> Member:
    return Member(
        registration=Registration(kind=kind, name=name),
        load=Load(activity=activity, **load),  # type: ignore[arg-type]  # its fields
    )


def fleet(second: int, **facts: float) -> FleetStatus:
    """At that second of a fleet in which something happens in each."""
    gateway = Activity(completed=second, failed=0, routed=2 * second, waited_s=3.0 * second)
    worker = Activity(completed=second, failed=3, steps=40 * second, turns=16 * second)
    control = Activity(steps=10 * second, turns=5 * second, lookups=second, hits=second)
    listed = ListMembersResponse(
        members=[
            member(kinds.GATEWAY, "gateway", gateway),
            member(kinds.CACHE, "cache", Activity(lookups=8, hits=6), memory_bytes=3 << 20),
            member(kinds.CONTROLNET, "nets", control, hosted=[Hosted(kind=kinds.CONTROLNET, name="edges", sessions=2)]),
            member(kinds.LORAS, "loras", Activity()),
            member(kinds.WORKER, "w0", worker, running=[RunningAttempt()] * 3, draining=True),
        ],
        **facts,  # type: ignore[arg-type]  # its fields
    )
    return fleet_from(listed)


def shown(*looks: FleetStatus) -> list[str]:
    rates = FleetRates()
    for second, look in enumerate(looks):
        rates.add(look, now=float(second))
    with StringIO() as file:
        Console(file=file, width=200).print(top_table(looks[-1], rates).table)
        return file.getvalue().splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.split()[:1] == [name]]
    return found


def test_each_service_has_its_rates_its_batch_and_its_hits() -> None:
    lines = shown(*(fleet(second) for second in range(1, 4)))
    assert row(lines, "gateway") == ["gateway", "gateway", "60.0", "0.0"]
    assert row(lines, "w0") == ["w0", "worker", "3", "(draining)", "60.0", "0.0", "40.0", "2.5"]
    assert row(lines, "nets") == ["nets", "controlnet", "2", "10.0", "2.0", "1.0", "100", "%"]
    assert row(lines, "loras") == ["loras", "loras", "0"]


def counted(name: str, *, heard_s: float = 0.0, **counted: float) -> Member:
    activity = Activity(**counted)  # type: ignore[arg-type]  # whole numbers, but for waited_s
    return Member(registration=Registration(kind="worker", name=name), load=Load(activity=activity), heard_s=heard_s)


def rates_of(*reports: tuple[float, Member]) -> Rates | None:
    """Of the last of these reports, each seen at its time."""
    rates = FleetRates()
    for now, report in reports:
        rates.add(fleet_from(ListMembersResponse(members=[report])), now=now)
    return rates.of(member_from(reports[-1][1]))


def test_rates_are_what_was_counted_between_two_reports_over_their_time() -> None:
    found = rates_of(
        (
            100.0,
            counted("w0", completed=7, failed=1, steps=300, turns=100, lookups=10, hits=9, routed=4, waited_s=1.0),
        ),
        (
            104.0,
            counted("w0", completed=9, failed=2, steps=360, turns=120, lookups=14, hits=10, routed=8, waited_s=7.0),
        ),
    )
    assert found == Rates(completed=0.5, failed=0.25, steps=15, lookups=1, batch=3, wait_s=1.5, hit_share=0.25)


def test_what_happened_before_the_window_is_not_in_it() -> None:
    burst = [(float(second), counted("w0", steps=1000 if second else 0, turns=1)) for second in range(12)]
    found = rates_of(*burst)
    assert found is not None
    assert found.steps == 0


def test_a_service_that_counts_anew_is_measured_anew() -> None:
    before = [(0.0, counted("w0", steps=900, completed=4)), (1.0, counted("w0", steps=910, completed=5))]
    assert rates_of(*before, (2.0, counted("w0", steps=20, completed=5))) is None
    found = rates_of(*before, (2.0, counted("w0", steps=20, completed=5)), (3.0, counted("w0", steps=30, completed=5)))
    assert found is not None
    assert found.steps == 10


def test_services_of_one_fleet_are_told_apart_and_those_that_left_are_forgotten() -> None:
    rates = FleetRates()
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=1), counted("w1", steps=1)])), now=0.0)
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=5)])), now=1.0)
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=5), counted("w1", steps=8)])), now=2.0)
    first, second = (rates.of(member_from(counted(name))) for name in ("w0", "w1"))
    assert first is not None
    assert first.steps == 2
    assert second is None

"""What the command's tables show at 80 columns."""

from __future__ import annotations

import pytest

from bottega.client.cli.fleet import accelerations_table, fleet_table
from bottega.client.cli.jobs import jobs_table
from bottega.client.cli.models import models_table
from bottega.client.cli.terminal import PlainTable, print_table
from bottega.client.cli.top import FleetRates, top_table
from bottega.client.types.fleet import FleetStatus, fleet_from
from bottega.client.types.jobs import status_from
from bottega.client.types.models import model_from
from bottega.v1.fleet_pb2 import Acceleration, Activity, ListMembersResponse, Load, Member, Registration
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted
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
    return fleet_from(ListMembersResponse(members=[member] * 2))


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
        (_models(), ("bottega-shapes", "1024x1024", "guidance")),
    ],
    ids=["jobs", "fleet", "fleet -v", "accelerations", "top", "models"],
)
def test_a_table_fits_80_columns_and_cuts_nothing(
    table: PlainTable, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(table, monkeypatch, capsys)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in text
    assert [word for word in kept if word not in text] == []


def test_names_wrap_where_nothing_is_left_to_leave_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = PlainTable("lora", "base", ">rank", ">size", "words", optional=("rank",))
    table.add_row(
        "watercolour-style@research", "stable-diffusion-xl-base-1.0", "128", "357 MiB", "watercolour, wet paper"
    )
    lines = _lines(table, monkeypatch, capsys)
    head = next(line for line in lines if "lora" in line)
    assert head.split() == ["lora", "base", "size", "words"]
    assert max(map(len, lines)) <= 80
    assert all(any(word in line for line in lines) for word in ("357 MiB", "watercolour, wet", "paper"))


def test_columns_without_room_are_named_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _lines(_jobs(), monkeypatch, capsys)
    head = next(line for line in lines if "prompt" in line)
    assert head.split() == ["job", "state", "steps", "prompt"]
    assert lines[-1] == "a wider terminal shows more: accepted, took"


def test_a_table_in_a_pipe_has_every_column_and_row_on_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = PlainTable("name", "text", optional=("name",))
    table.add_row("n" * 150, "word " * 30 + "end")
    print_table(table)
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines() if "end" in line] == [32]

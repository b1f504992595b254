"""How `bottega templates list` looks on a terminal of 80 letters."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from bottega import kinds
from bottega.addons.edits.client.cli import holders_table, shared_texts, templates_table
from bottega.addons.edits.client.types import FleetTemplate, TemplateHolder, template_from
from bottega.client.cli.terminal import PlainTable
from bottega.v1.activations_pb2 import TEMPLATE_TIER_OBJECTS, Template

MIB, GIB = 1 << 20, 1 << 30
LETTERS = 80


def _shown(table: PlainTable) -> list[str]:
    console = Console(file=io.StringIO(), width=LETTERS)
    console.print(table.table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _known(number: int, **facts: object) -> FleetTemplate:
    """One of SDXL, large and old: what takes most letters."""
    fields: dict[str, object] = {
        "id": f"{number:032x}"[::-1],
        "model": "sdxl-base-1.0",
        "width": 1024,
        "height": 1024,
        "size_bytes": 2662 * MIB,
        "memory_bytes": number % 3 * 1331 * MIB,
        "steps": 50,
        "uses": 12_345,
        "idle_s": 86_400.0 * 12,
        "valid_share": 1.0,
    }
    workers = ("worker-gpu-rack7-0", "worker-gpu-rack7-1", "worker-gpu-rack7-2")[: number % 4]
    template = Template(**{**fields, **facts})  # type: ignore[arg-type]
    return template_from([template], store="activations", workers=workers)


def test_nothing_is_cut_and_every_template_is_there() -> None:
    known = [_known(number, pinned=number % 5 == 0, in_use=number % 7 == 1) for number in range(30)]
    lines = _shown(templates_table(known))
    assert all(len(line) <= LETTERS and "…" not in line for line in lines)
    assert [line for each in known for line in lines if each.id[:12] in line and "2.60 GiB" in line]
    assert sum("1024x1024" in line for line in lines) == len(known)


def test_where_a_template_is_and_its_state_are_said() -> None:
    cases: list[tuple[int, dict[str, object], str]] = [
        (0, {}, "disk"),
        (1, {}, "memory50%,worker-gpu-rack7-0"),
        (2, {}, "memory,worker-gpu-rack7-0,worker-gpu-rack7-1"),
        (3, {}, "disk,3workers"),
        (0, {"tier": TEMPLATE_TIER_OBJECTS, "pinned": True}, "S3;pinned"),
        (0, {"pinned": True, "in_use": True}, "disk;pinned;inuse"),
        (0, {"valid_share": 0.999}, "disk;99%oftheimage"),
        (0, {"recording": True, "valid_share": 0.5}, "disk;recording"),
    ]
    assert [_where(_known(number, **facts)) for number, facts, _ in cases] == [said for *_, said in cases]


def _where(known: FleetTemplate) -> str:
    """What the last column says, in however many lines, without spaces."""
    lines = _shown(templates_table([known]))
    begin = lines[1].index("where")
    return "".join(line[begin:] for line in lines[3:]).replace(" ", "")


def test_the_room_of_stores_and_workers_is_said() -> None:
    store = TemplateHolder(
        name="activations",
        kind=kinds.ACTIVATIONS,
        templates=812,
        memory_bytes=3 * GIB,
        memory_budget_bytes=16 * GIB,
        disk_bytes=190 * GIB,
        disk_budget_bytes=256 * GIB,
    )
    worker = TemplateHolder(
        name="worker-0", kind=kinds.WORKER, templates=4, memory_bytes=412 * MIB, memory_budget_bytes=512 * MIB
    )
    rows = [line.split() for line in _shown(holders_table([store, worker]))]
    room = ["3.00", "GiB", "of", "16.0", "GiB", "190.0", "GiB", "of", "256.0", "GiB"]
    assert ["store", "activations", "812", *room] in rows
    assert ["worker", "worker-0", "4", "412", "MiB", "of", "512", "MiB"] in rows
    assert all("on" not in line.split() for line in _shown(holders_table([worker])))
    shared = replace(store, name="shared", objects_bytes=2 * GIB, objects_budget_bytes=512 * GIB)
    assert shared_texts([shared, replace(shared, name="other"), worker]) == [
        "In S3, for all stores: 2.00 GiB of 512.0 GiB"
    ]

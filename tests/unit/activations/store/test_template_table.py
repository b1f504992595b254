"""The table of templates: what is found, what goes first, and that what has gone has gone from everywhere."""

from __future__ import annotations

from bottega.activations.records import DrawnFile, SectionKey, SectionRecord, TemplateRecord, TemplateUse, section_place
from bottega.activations.store.template_table import TemplateTable, files_of
from bottega.v1.activations_pb2 import RecordingHeader
from tests.support.stored_templates import ALL, LAYOUT, SECTION_BYTES, SHAPE

_DRAWN_BYTES = 100
_TEMPLATE_BYTES = 2 * SECTION_BYTES + _DRAWN_BYTES


def _section(name: str, step: int) -> SectionRecord:
    key = SectionKey(timestep=float(100 - step), noise_level=1.0, half=0)
    return SectionRecord(key=key, digest=f"{name}{step}", layout=LAYOUT, map=ALL, prompt="")


def _template(number: int, name: str, *, source: str = "s", steps: int = 2) -> TemplateRecord:
    header = RecordingHeader(
        key=name, recording=f"r{name}", source=source, latent_height=SHAPE[2], latent_width=SHAPE[3]
    )
    sections = [_section(name, step) for step in range(steps)]
    drawn = DrawnFile(digest=f"{name}d", shape=SHAPE, size_bytes=_DRAWN_BYTES)
    return TemplateRecord(
        number, header, drawn=drawn, sections={each.key: each for each in sections}, use=TemplateUse()
    )


def _table(*names: str, room: int = 100) -> TemplateTable:
    clock = iter(range(1, 1000))
    table = TemplateTable(budget_bytes=room * _TEMPLATE_BYTES, max_templates=100, now=lambda: float(next(clock)))
    for number, name in enumerate(names):
        table.add(_template(number, name))
    table.take_changes()
    return table


def _names(table: TemplateTable) -> list[str]:
    return [template.key for template in table.newest()]


def test_what_is_found_is_used_and_written() -> None:
    table = _table("a", "b", "c")
    found = table.find("a")
    assert found is not None
    assert (found.use.uses, found.valid_share, found.step_count, found.size_bytes) == (1, 1.0, 2, _TEMPLATE_BYTES)
    assert table.find("a", "other") is None
    assert table.find("z") is None
    assert table.get("b") is not None
    assert _names(table) == ["a", "c", "b"]
    changes = table.take_changes()
    assert list(changes.uses) == [0]
    assert not table.take_changes()


def test_room_is_made_by_whole_templates_that_are_neither_pinned_nor_meant() -> None:
    table = _table("a", "b", "c", room=3)
    assert table.pin("rb", pinned=True) == 1
    gone = table.make_room(1, but="a")
    assert gone is not None
    assert [template.key for template in gone] == ["c"]
    assert sorted(files_of(gone)) == ["c0", "c1", "cd"]
    assert table.make_room(3 * _TEMPLATE_BYTES) is None
    assert _names(table) == ["b", "a"], "none goes in vain"
    assert table.section("c0") is None
    assert {template.key for template in table.expect("s")} == {"a", "b"}
    assert 2 in table.take_changes().gone


def test_what_is_lost_is_one_section_until_it_was_the_last() -> None:
    table = _table("a", "b")
    assert table.lose("a0") == ["a0"]
    assert table.lose("a0") == []
    assert table.section("a0") is None
    assert table.section("a1") is not None
    changes = table.take_changes()
    assert changes.gone_parts == {section_place(0, SectionKey(timestep=100.0, noise_level=1.0, half=0))}
    assert sorted(table.lose("a1")) == ["a1", "ad"]
    assert table.get("a") is None
    assert sorted(table.lose("bd")) == ["b0", "b1", "bd"]
    assert table.take_changes().gone == {0, 1}
    totals = table.totals()
    assert (totals.templates, totals.sections, totals.size_bytes) == (0, 0, 0)
    assert table.expect("s") == []


def test_what_an_edit_is_on_its_way_to_goes_last_though_no_worker_asks_for_it() -> None:
    table = _table("a", "b", "c", room=3)
    table.add(_template(7, "d", source="other"))
    assert [template.key for template in table.expect("other")] == ["d"]
    table.find("a")
    assert table.expect("s")[0].key == "a"
    assert table.expect("nobody's") == []
    assert table.newest()[0].use.uses == 1
    gone = table.make_room(0)
    assert gone is not None
    assert [template.key for template in gone] == ["b"]


def test_templates_within_the_budget_go_where_the_disk_has_less_room() -> None:
    table = _table("a", "b", "c", "d")
    assert table.pin("rb", pinned=True) == 1
    gone = table.free(_TEMPLATE_BYTES + 1, but="a")
    assert gone is not None
    assert [template.key for template in gone] == ["c", "d"]
    assert table.free(_TEMPLATE_BYTES + 1) is None
    assert _names(table) == ["b", "a"], "none goes in vain"
    assert table.take_changes().gone == {2, 3}

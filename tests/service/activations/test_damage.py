"""Damage is found before a byte of it is served, and costs what is damaged, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bottega.errors import DataLoss, Unavailable
from tests.support.stored_templates import (
    SECTION_BYTES,
    WAIT_S,
    answer,
    elements,
    question_of,
    read,
    record,
    running_store,
    section_paths,
    send_sections,
    tensors_of,
)

_STEPS = 10


def _file(folder: Path, digest: str) -> Path:
    return folder / "sections" / digest[:2] / digest


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("flips", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_every_flipped_bit_is_found(tmp_path: Path, flips: int) -> None:
    """Anywhere in a file, wherever it is read to: into memory, again, or past it."""
    chance = random.Random(flips)
    with running_store(tmp_path, memory_budget_bytes=2 * SECTION_BYTES) as store:
        record(store, "template", _STEPS)
        for flip in range(flips):
            digest = chance.choice(answer(store, "template").sections).digest
            past_memory = flip % 3 == 0
            others = [info.digest for info in answer(store, "template").sections if info.digest != digest][:2]
            leases = [store.fetch(other).result(WAIT_S) for other in others]  # memory has room for no other
            if not past_memory:
                while leases:
                    store.give_back(leases.pop())
            _flip(_file(tmp_path, digest), chance.randrange(8 * SECTION_BYTES))
            with pytest.raises(DataLoss):
                store.fetch(digest).result(WAIT_S)
            for lease in leases:
                store.give_back(lease)
            with pytest.raises(Unavailable):
                store.fetch(digest).result(WAIT_S)
            sections = answer(store, "template").sections
            assert len(sections) == _STEPS - 1, "the rest is of use"
            lost = set(range(_STEPS)) - {_step(info.key.timestep) for info in sections}
            send_sections(store, "template", list(lost))
            assert store.flush(WAIT_S)
        assert store.statistics().damaged == flips
        for step, info in enumerate(answer(store, "template").sections):
            assert elements(read(store, info.digest)[0]) == [bytes(each) for each in tensors_of(f"template {step}")]


def _step(timestep: float) -> int:
    return round((981.0 - timestep) / 20.5)


def test_what_was_lost_while_no_store_was_open_is_missing_and_the_rest_is_not(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "template", _STEPS)
        digests = [info.digest for info in answer(store, "template").sections]
    _file(tmp_path, digests[2]).unlink()
    _file(tmp_path, digests[4]).write_bytes(b"torn")
    (tmp_path / "sections" / "ab").mkdir(exist_ok=True)
    (tmp_path / "sections" / "ab" / ("ab" * 32)).write_bytes(b"nobody's")
    (tmp_path / "sections" / "incoming" / "torn").write_bytes(b"half")
    with running_store(tmp_path) as store:
        found = [info.digest for info in answer(store, "template").sections]
        assert found == [digest for place, digest in enumerate(digests) if place not in (2, 4)]
        for digest in found:
            read(store, digest)
        assert {path.name for path in section_paths(tmp_path)} >= set(found)
        assert len(section_paths(tmp_path)) == len(found) + 1, "what nobody knows is deleted"
        assert not list((tmp_path / "sections" / "incoming").iterdir())


def test_a_template_whose_latent_and_noise_are_damaged_is_none(tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        record(store, "template", _STEPS)
    (drawn,) = (path for path in section_paths(tmp_path) if path.stat().st_size != SECTION_BYTES)
    _flip(drawn, 77)
    with running_store(tmp_path) as store:
        reply = store.answer(question_of("template"), "worker")
        assert (reply.header.recording, reply.drawn) == ("", None)
        assert reply.header.record, "it may be recorded anew"
        record(store, "template", 2)
        assert len(answer(store, "template").sections) == 2
        assert store.statistics().damaged == 1

"""A process that keeps a store of templates at work, and says on stdout how far it is: for kills.

It never ends by itself. Lines are "begun"; "sound N" when what was there has been looked through, all N sections;
"writing" then. It ends with status 1, and says why, where something was not as it was recorded.

Its budget is small, so that there are always evictions; workers come and go, so that there are always halves of
templates; sections take the place of others.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path

from bottega.activations.store.store import ActivationStore
from tests.support.stored_templates import (
    LAYOUT,
    SECTION_BYTES,
    WAIT_S,
    answer,
    drawn_of,
    elements,
    question_of,
    read,
    recording_header,
    section_header,
    section_paths,
    settings_of,
    take_section,
    tensors_of,
)

_STEPS = 6
_TEMPLATES = 12
_BUDGET_BYTES = 8 * (_STEPS + 2) * SECTION_BYTES


def store_of(folder: Path) -> ActivationStore:
    """As every process of such a test has it."""
    given = settings_of(
        folder, disk_budget_bytes=_BUDGET_BYTES, memory_budget_bytes=10 * SECTION_BYTES, retry_s=0.02, max_loads=4
    )
    return ActivationStore(given)


def look_through(store: ActivationStore, folder: Path) -> int:
    """Reads every section there is; how many. Raises AssertionError for one that is not what was recorded."""
    number = 0
    for name in map(str, range(_TEMPLATES)):
        reply = store.answer(question_of(name, would_record=False), "looks")
        if reply.header.recording:
            assert reply.drawn is not None, "latent and noise are gone"
            assert bytes(reply.drawn.noise) == drawn_of(name).noise, "the noise is another"
        number += len(reply.header.sections)
        for info in reply.header.sections:
            _check(read(store, info.digest)[0], name, info.key.timestep, info.prompt)
    figures = store.statistics()
    files = section_paths(folder)
    assert figures.disk_bytes == sum(path.stat().st_size for path in files) <= _BUDGET_BYTES, "there are others"
    assert (figures.sections, figures.damaged, figures.trouble) == (number, 0, "")
    return number


def _check(data: bytes, name: str, timestep: float, prompt: str) -> None:
    """What a section holds follows from these alone."""
    assert elements(data) == [bytes(each) for each in tensors_of(_content(name, timestep, prompt))], "it is another"


def _content(name: str, timestep: float, prompt: str) -> str:
    return f"{name} {timestep} {prompt}"


def _send(store: ActivationStore, name: str, step: int, prompt: str, link: str) -> None:
    header = section_header(name, step, prompt=prompt)
    views = tensors_of(_content(name, header.section.timestep, prompt))
    take_section(store, header, LAYOUT, views, link)


def work(store: ActivationStore, chance: random.Random, turn: int) -> None:
    """What a worker does for one edit. turn: which one, of all workers."""
    name, link = str(chance.randrange(_TEMPLATES)), f"worker {turn}"
    found = answer(store, name, link=link)
    prompts = [f"{number:064x}" for number in range(3)]
    if found.record:
        for step in range(_STEPS):
            _send(store, name, step, prompts[0], link)
        if chance.random() < 0.8:
            store.complete(recording_header(name), drawn_of(name), link)
        store.link_ended(link)
    elif found.recording:
        _send(store, name, chance.randrange(_STEPS), chance.choice(prompts), link)
        for info in chance.sample(list(found.sections), 2):
            asked = store.fetch(info.digest)
            if asked.exception(WAIT_S) is None:  # else it was replaced, or evicted
                lease = asked.result()
                data = os.pread(lease.descriptor, lease.size_bytes, 0)
                store.give_back(lease)
                _check(data, name, info.key.timestep, info.prompt)


def main() -> None:
    """Argument: the folder."""
    _say("begun")
    folder = Path(sys.argv[1])
    store = store_of(folder)
    store.start()
    assert store.flush(WAIT_S), store.statistics().trouble
    _say(f"sound {look_through(store, folder)}")
    chance = random.Random()
    _say("writing")
    for turn in itertools.count():
        work(store, chance, turn)
        if turn % 20 == 19:
            store.flush(WAIT_S)
        if turn % 200 == 199:
            store.drop("")


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()

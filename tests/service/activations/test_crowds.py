"""Many workers at once, each with links that come and go: what is served is what was recorded, and nothing leaks."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

from tests.support.stored_templates_writer import look_through, store_of, work


def test_what_many_workers_do_at_once_is_not_mixed_up(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
    store = store_of(tmp_path)
    store.start()
    failures: list[BaseException] = []

    def worker(number: int) -> None:
        chance = random.Random(number)
        try:
            for turn in range(60):
                work(store, chance, number * 1000 + turn)
                if chance.random() < 0.03:
                    store.drop("")
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(80.0)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert store.flush(20.0)
    figures = store.statistics()
    assert (figures.waiting, figures.waiting_bytes, figures.trouble) == (0, 0, "")
    assert figures.recorded > 20
    assert figures.recording == 0, "every link has ended"
    store.close()
    store = store_of(tmp_path)
    store.start()
    look_through(store, tmp_path)
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208 - names alone

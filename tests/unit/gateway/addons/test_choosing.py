"""Which server runs a ControlNet for a job: readiness, then load, then spread, and always one version."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from bottega.gateway.addons.controlnets.ranking import ServerCandidate, best_first
from tests.samples.controlnet_hosts import LOADED, LOADING, ON_DISK


def _candidate(server: str, **facts: Any) -> ServerCandidate:
    return ServerCandidate(**{"server": server, "digest": "d", "state": LOADED, "sessions": 0, **facts})


def _names(*candidates: ServerCandidate, job_id: str = "j", digest: str = "") -> list[str]:
    ranked = best_first(candidates, name="edges", job_id=job_id, digest=digest)
    return [candidate.server for candidate in ranked]


def test_one_that_has_it_loaded_goes_before_one_that_loads_it_and_that_before_one_that_has_it_on_the_disk() -> None:
    disk = _candidate("disk", state=ON_DISK)
    loading = _candidate("loading", state=LOADING, sessions=1)
    loaded = _candidate("loaded", sessions=9)
    assert _names(disk, loading, loaded) == ["loaded", "loading", "disk"]


def test_of_those_that_are_ready_the_least_loaded_goes_first() -> None:
    assert _names(_candidate("a", sessions=2), _candidate("b", sessions=1), _candidate("c", sessions=3)) == [
        "b",
        "a",
        "c",
    ]


def test_jobs_spread_over_servers_that_are_equally_ready() -> None:
    servers = [_candidate(name) for name in "abcd"]
    firsts = Counter(_names(*servers, job_id=f"job-{number}")[0] for number in range(400))
    assert set(firsts) == set("abcd")
    assert min(firsts.values()) > 50


def test_all_jobs_agree_on_the_server_that_loads_what_nobody_has_loaded() -> None:
    servers = [_candidate(name, state=ON_DISK) for name in "abcd"]
    assert len({_names(*servers, job_id=f"job-{number}")[0] for number in range(100)}) == 1
    firsts = {best_first(servers, name=f"net-{number}", job_id="j")[0].server for number in range(40)}
    assert firsts == set("abcd"), "but not every ControlNet is loaded by the same one"


def test_the_same_facts_give_the_same_order_however_they_come() -> None:
    servers = [_candidate(name, state=state) for name, state in zip("abcdef", [LOADED, ON_DISK] * 3, strict=True)]
    wanted = _names(*servers)
    for seed in range(20):
        shuffled = random.Random(seed).sample(servers, k=len(servers))
        assert _names(*shuffled) == wanted


def test_servers_of_another_version_never_stand_in() -> None:
    old, new = _candidate("old", digest="1", sessions=5), _candidate("new", digest="2")
    assert _names(old, new) == ["new"]
    assert _names(old, new, digest="1") == ["old"]
    assert _names(new, digest="1") == ["new"], "nobody has the old one any more"

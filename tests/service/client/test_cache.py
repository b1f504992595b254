"""The command with approximate caching, against a gateway that follows a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import CacheEntryGone, DataLoss, InvalidRequest, Violation
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import Techniques
from tests.fakes.scripted_gateway import ScriptedGateway, completed
from tests.support.terminal import run

pytestmark = pytest.mark.usefixtures("own_folder")

ENTRY = "0f" * 16
PROMPTS = "a red star\n\n  a blue star  \na red star\na green ring\n"


def test_the_switches_and_the_pin_reach_the_gateway(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[completed()], [completed()]]
    for words in (f"--cache --cache-entry {ENTRY}@10 --no-identical", "--no-cache --identical"):
        assert run("generate", "a star", *words.split(), address=address).exit_code == 0
    assert [request.spec.techniques for request in gateway.requests] == [
        Techniques(approximate_cache=True, cache_entry=f"{ENTRY}@10", identical_results=False),
        Techniques(approximate_cache=False, identical_results=True),
    ]


def test_a_pin_that_is_gone_is_said_with_what_helps(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[CacheEntryGone(f"the cached latent {ENTRY}@10 is gone", metadata={"entry": f"{ENTRY}@10"})]]
    result = run("generate", "a star", "--cache-entry", f"{ENTRY}@10", address=address)
    assert result.exit_code == 1
    assert f"error: the cached latent {ENTRY}@10 is gone\n  bottega cache inspect ENTRY shows" in result.stderr


def _drawn_before() -> image_pb2.JobEvent:
    done = completed()
    done.completed.provenance.identical_job = "job-0"
    return done


def test_warming_draws_each_prompt_once_and_the_first_one_twice(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    (own_folder / "prompts.txt").write_text(PROMPTS)
    gateway.scripts = [[completed()] for _ in range(4)]
    result = run("cache", "warm", "prompts.txt", "--steps", "20", "--at-once", "1", address=address)
    assert (result.exit_code, result.stdout) == (0, "3 prompts: 3 drawn\n")
    assert "3 of 3 prompts" in result.stderr
    sent = [(request.spec.prompt, request.spec.techniques.identical_results) for request in gateway.requests]
    assert sent == [("a red star", True), ("a red star", False), ("a blue star", True), ("a green ring", True)]
    assert {(request.spec.seed, request.spec.num_inference_steps) for request in gateway.requests} == {(0, 20)}


def test_what_no_prompt_can_be_drawn_for_ends_it_at_once(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    (own_folder / "prompts.txt").write_text(PROMPTS)
    wide = InvalidRequest("1 field", violations=[Violation(field="spec.width", description="too wide")])
    for error, status, said in ((wide, 2, "too wide"), (DataLoss("the job log is damaged"), 1, "log is damaged")):
        gateway.requests.clear()
        gateway.scripts = [[_drawn_before()], [error], [error]]
        result = run("cache", "warm", "prompts.txt", "--at-once", "1", address=address)
        assert (result.exit_code, said in result.stderr) == (status, True)
        assert len(gateway.requests) == 2


def test_what_would_warm_nothing_is_refused(gateway: ScriptedGateway, address: str, own_folder: Path) -> None:
    many = b"\n".join(b"%d" % number for number in range(100_001))
    cases: tuple[tuple[bytes, tuple[str, ...], str], ...] = (
        (b"\xff\xfe", (), "no UTF-8 text"),
        (b" \n\n", (), "it is empty"),
        (many, (), "at most 100,000 prompts"),
        (b"a star", ("--no-cache",), "nothing is recorded"),
    )
    for data, arguments, said in cases:
        (own_folder / "prompts.txt").write_bytes(data)
        result = run("cache", "warm", "prompts.txt", *arguments, address=address)
        assert (result.exit_code, said in " ".join(result.stderr.split())) == (2, True)
    assert not gateway.requests


def test_a_cache_that_is_not_there_is_said_with_where_to_look(address: str) -> None:
    for words in (["cache"], ["cache", "inspect", ENTRY], ["cache", "clear", "--yes"], ["cache", "profiles"]):
        result = run(*words, address=address)
        assert result.exit_code == 1
        assert "error: no approximate cache has joined; bottega fleet shows who has\n" in result.stderr
        assert "bottega logs cache says why one has not" in result.stderr


def test_it_is_said_what_pictures_started_from_and_what_was_skipped(gateway: ScriptedGateway, address: str) -> None:
    one, two = completed(), completed()
    one.completed.provenance.cached_starts.add(entry=f"{ENTRY}@10", similarity=0.9344, from_step=9, skipped_steps=4)
    for image in (1, 3):
        two.completed.provenance.cached_starts.add(
            entry=f"{ENTRY}@2", similarity=0.7, from_step=1, skipped_steps=1, image=image, without_loras=True
        )
    gateway.scripts = [[one], [two]]
    lines = run("generate", "a star", address=address).stdout.splitlines()
    assert lines[-1] == f"cache: starts from {ENTRY}@10, similarity 0.934; 4 steps skipped (approximate)"
    lines = run("generate", "a star", address=address).stdout.splitlines()
    how = "(approximate, without the LoRAs)"
    assert lines[-2:] == [
        f"cache: picture {image} starts from {ENTRY}@2, similarity 0.700; 1 step skipped {how}" for image in (1, 3)
    ]


def test_it_is_said_that_an_identical_request_was_not_drawn(gateway: ScriptedGateway, address: str) -> None:
    done = completed()
    done.completed.provenance.identical_job = "job-0"
    gateway.scripts = [[done]]
    said = run("generate", "a star", address=address).stdout
    assert "nothing was drawn: this is the stored result of job job-0, an identical request\n" in said

"""`bottega cache warm`: draws a file's prompts, so that the approximate cache has them before anybody asks."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.cli.cache.prompt_file import read_prompt_file
from bottega.client.cli.gateway_options import address_option, connect
from bottega.client.cli.generation_options import generation_options
from bottega.client.cli.terminal import fail, new_console, note, say, text_column
from bottega.client.sdk.clients import Client
from bottega.client.types.options import GenerationOptions
from bottega.errors import InvalidRequest, NotFinite

# Of a file: half a day of the smallest model.
_MOST_PROMPTS = 100_000
# Plain lines go to logs: ten a file say enough.
_LINES = 10
_PROMPT = "spec.prompt"


class _Outcome(StrEnum):
    DRAWN = "drawn"
    THERE = "drawn before"
    FAILED = "failed"


@click.command("warm")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--at-once", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests under way.")
@generation_options
@address_option
def command(*, file: Path, at_once: int, address: str, **given: Any) -> None:
    """Draw each prompt of FILE, one a line, so that requests like them may start from its latents.

    The other options are those of `bottega generate`: requests start only from latents that were drawn with the same
    parameters as their own. Without --seed it is 0, so that to do it again costs nothing where the gateway still has
    the results: what was interrupted is begun anew. The first prompt is drawn twice, because a cache records a kind of
    request from its second one on.
    """
    if given["approximate_cache"] is False or given["cache_entry"]:
        raise click.UsageError("with --no-cache or --cache-entry nothing would be recorded; leave it out")
    options = _options(given)
    prompts = _read(file)
    with connect(address) as client, _showing(len(prompts)) as show:
        counts = _draw_all(client, prompts, options, at_once=at_once, show=show)
    listed = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _Outcome if counts[outcome])
    say(f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}: {listed}")
    sys.exit(1 if counts[_Outcome.FAILED] else 0)


def _options(given: dict[str, Any]) -> GenerationOptions:
    options: GenerationOptions = {}
    for part in generation_parts():
        part.merge(options, given, None)
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return cast("GenerationOptions", {"seed": 0, "identical_results": True} | options | chosen)


def _read(file: Path) -> list[str]:
    """Its prompts, each once, in their order. Ends the command where there are none."""
    lines = read_prompt_file(file).splitlines()
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts or len(prompts) > _MOST_PROMPTS:
        said = f"at most {_MOST_PROMPTS} prompts are drawn" if prompts else "it is empty"
        fail(f"{file} cannot be drawn: {said}", status=2)
    return prompts


def _draw_all(
    client: Client,
    prompts: Sequence[str],
    options: GenerationOptions,
    *,
    at_once: int,
    show: Callable[[int], None],
) -> Counter[_Outcome]:
    """Raises what is no fault of a single prompt; what has not begun then is not drawn."""
    counts = Counter([_draw_first(client, prompts[0], options)])
    show(1)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for outcome in _in_turn(pool, lambda prompt: _draw(client, prompt, options), prompts[1:], at_once):
                counts[outcome] += 1
                show(counts.total())
        except BaseException:
            client.close()  # cancels what is being drawn, so that nobody waits for it
            raise
    return counts


def _in_turn(
    pool: ThreadPoolExecutor, draw: Callable[[str], _Outcome], prompts: Sequence[str], at_once: int
) -> Iterator[_Outcome]:
    """Outcomes as they come; no more than `at_once` have begun."""
    waiting = iter(prompts)
    running: set[Future[_Outcome]] = {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, at_once)}
    while running:
        done = next(as_completed(running))
        running.remove(done)
        yield done.result()
        running |= {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, 1)}


def _draw_first(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    """The request that makes its kind known is not recorded, so a new one is drawn once more."""
    outcome = _draw(client, prompt, options)
    if outcome is _Outcome.DRAWN:
        _draw(client, prompt, options | {"identical_results": False})
    return outcome


def _draw(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    try:
        provenance = client.generate(prompt, **options).provenance
    except (InvalidRequest, NotFinite) as error:
        if any(item.field != _PROMPT for item in error.violations):
            raise  # so it is for all of them
        note(f"{prompt}: {'; '.join(item.description for item in error.violations) or error.message}")
        return _Outcome.FAILED
    return _Outcome.THERE if provenance.identical_job else _Outcome.DRAWN


@contextmanager
def _showing(total: int) -> Iterator[Callable[[int], None]]:
    """Gives the function that shows how many are done: a bar on a terminal, some lines elsewhere."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        yield _TenthLines(total).show
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), BarColumn(bar_width=32), text_column("done"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total, done=f"0/{total}")
        yield lambda done: bar.update(task, completed=done, done=f"{done}/{total}")


class _TenthLines:
    """A line for each tenth."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._said = 0

    def show(self, done: int) -> None:
        tenth = done * _LINES // self._total
        if tenth > self._said:
            self._said = tenth
            note(f"{done} of {self._total} prompts")

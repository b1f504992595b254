"""`bottega cache profile` and `bottega cache warm`, which draw the prompts of a file."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import click
from google.protobuf import json_format

from bottega.addons.cache.client.profiling import (
    MOST_DRAWS,
    MOST_PAIRS,
    CacheMeasurement,
    MeasuredCache,
    estimate_drawing,
)
from bottega.addons.cache.client.samples import (
    ALPHAS,
    PromptPair,
    miniature_pairs,
    pairs_of_file,
    skip_profile,
    thin_out,
    use_of,
)
from bottega.addons.cache.client.types import CacheProfile, profile_to_wire
from bottega.addons.cache.skip_profile import LEAST_SAMPLES, SHARE, LengthClass
from bottega.addons.cache.starts import FRACTIONS
from bottega.client.cli.addons import generation_parts
from bottega.client.cli.generation_options import generation_options
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import (
    PlainTable,
    confirm,
    duration_text,
    fail,
    is_interactive,
    new_console,
    note,
    print_table,
    say,
    short_hash,
    text_column,
)
from bottega.client.sdk.clients import Client
from bottega.client.types.options import GenerationOptions
from bottega.errors import InvalidRequest, NotFinite
from bottega.miniature import MODELS
from bottega.state_folder import write_whole

_MODEL = "the model"
# Pairs between two lines of progress.
_EVERY = 10
_PAIRS, _DRAWS = click.IntRange(LEAST_SAMPLES, MOST_PAIRS), click.IntRange(1, MOST_DRAWS)


@click.command("profile")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a prompt on each line, as people sent them. Neighbouring lines make a pair, unless an empty line "
    "separates them. The embedded model needs none.",
)
@click.option("--pairs", "most", type=_PAIRS, default=200, show_default=True, help="Maximum number of pairs.")
@click.option(
    "--draws",
    type=_DRAWS,
    default=2,
    show_default=True,
    help="How often each pair is drawn, with new seeds each time.",
)
@click.option(
    "--clip",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a Hugging Face CLIP model that scores the pictures. The embedded model has a scorer of its own.",
)
@click.option("--steps", type=click.IntRange(4, 200), help="Denoising steps of each picture (default: the model's).")
@click.option("--model", help="Model to measure; default: the only one that is served.")
@click.option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to which measured pairs are written; with it, an interrupted command continues where it stopped.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the profile to this file.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@address_option
@fleet_option
def profile(
    *,
    prompts: Path | None,
    most: int,
    draws: int,
    clip: Path | None,
    steps: int | None,
    model: str | None,
    samples: Path | None,
    output: Path | None,
    yes: bool,
    address: str,
) -> None:
    """Measure how similar two prompts must be to share latents.

    Both prompts of each pair are drawn from noise, and the second one also from the latents of the first. The threshold
    is the least similarity from which 95 % of the pairs keep their quality: more than .9 of it with --fidelity
    balanced, .8 with fast. It is measured for each share of skipped steps, and for short and long prompts. The caches
    store the thresholds as the model's profile. Before drawing, the command prints the number of pictures and asks for
    confirmation.
    """
    with connect(address) as client:
        pairs = thin_out(pairs_of_file(read_prompt_file(prompts)), most) if prompts else ()
        wanted = CacheMeasurement(
            pairs=pairs or _miniature_pairs(client, model, most, clip),
            clip=clip,
            draws=draws,
            num_inference_steps=steps,
            model=model,
            samples=samples,
        )
        _announce(wanted, client)
        if not yes:
            if not is_interactive():
                fail("this needs a confirmation, but does not run at a terminal", "Confirm with --yes.", status=2)
            confirm("Draw them?")
        measured = client.profile_cache(wanted, on_pair=_note_progress)
    if output is not None:
        _write_profile(output, measured.profile)
    _report(measured, model or _MODEL)


def _announce(wanted: CacheMeasurement, client: Client) -> None:
    drawing = estimate_drawing(wanted, client.fleet())
    bound = "at most " if wanted.samples else ""
    duration = f", about {duration_text(drawing.seconds)}" if drawing.seconds is not None else ""
    note(f"{len(set(wanted.pairs))} pairs of prompts: {bound}{drawing.pictures} pictures to draw{duration}")


def _miniature_pairs(client: Client, model: str | None, most: int, clip: Path | None) -> list[PromptPair]:
    """Return generated pairs of prompts for an embedded model. Raise UsageError if another model is measured."""
    served = [one.name for one in client.models() if model in (None, one.name)]
    if len(served) != 1 or served[0] not in MODELS:
        options = "--prompts FILE" if clip else "--prompts FILE --clip FOLDER"
        raise click.UsageError(f"only embedded models have built-in prompts; run bottega cache profile {options}")
    return miniature_pairs(most)


def _write_profile(output: Path, profile: CacheProfile) -> None:
    text = json_format.MessageToJson(profile_to_wire(profile), ensure_ascii=False) + "\n"
    try:
        write_whole(output, text.encode())
    except OSError as error:
        note(f"{output} cannot be written: {error.strerror}. The caches have the profile.")


def _note_progress(done: int, pairs: int) -> None:
    if done % _EVERY == 0 or done == pairs:
        note(f"  {done} of {pairs} pairs")


def _report(measured: MeasuredCache, name: str) -> None:
    if measured.unrecorded:
        note(f"{measured.unrecorded} pairs are missing, because the cache did not record their pictures.")
    profile = measured.profile
    if any(length_class.thresholds for length_class in (*profile.balanced.classes, *profile.fast.classes)):
        print_profiles([profile], {profile.model_hash: name})
    for fidelity, alpha in ALPHAS.items():
        _report_use(fidelity, alpha, measured)


def _report_use(fidelity: str, alpha: float, measured: MeasuredCache) -> None:
    use = use_of(skip_profile(measured.samples, alpha), measured.samples)
    starting, saved = sum(use.shares.values()), sum(fraction * share for fraction, share in use.shares.items())
    if not starting:
        say(f"{fidelity}: nothing is reused: no similarity keeps {alpha:g} of the quality in {SHARE:.0%} of pairs.")
        return
    say(
        f"{fidelity}: {starting:.0%} of these pairs start from a latent, which saves {saved:.0%} of all steps; "
        f"their mean quality is {use.cached:.3f}, from noise {use.uncached:.3f}"
    )


# Prompts of a file: half a day of the smallest model.
_MOST_PROMPTS = 100_000
# Lines of progress where there is no terminal, such as in a log.
_LINES = 10
_PROMPT = "spec.prompt"


class _Outcome(StrEnum):
    DRAWN = "drawn"
    THERE = "drawn before"
    FAILED = "failed"


@click.command("warm")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--at-once", type=click.IntRange(1, 64), default=4, show_default=True, help="Number of concurrent requests."
)
@generation_options
@address_option
def warm(*, file: Path, at_once: int, address: str, **given: Any) -> None:
    """Draw each line of FILE to fill the cache.

    The other options are those of `bottega generate`, because a request starts only from latents that were drawn with
    the same settings. The default seed is 0, so that after an interruption the same command can be repeated: the
    gateway returns the pictures that it still has. The first prompt is drawn twice, because a cache only records from
    the second request with the same settings on.
    """
    if given["approximate_cache"] is False or given["cache_entry"]:
        raise click.UsageError("with --no-cache or --cache-entry nothing is recorded; leave it out")
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
    """Return the prompts of a file without duplicates. End the command if there are none, or too many."""
    lines = read_prompt_file(file).splitlines()
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts or len(prompts) > _MOST_PROMPTS:
        rule = f"a file may have at most {_MOST_PROMPTS:,} prompts" if prompts else "it is empty"
        fail(f"{file} cannot be drawn: {rule}", status=2)
    return prompts


def _draw_all(
    client: Client,
    prompts: Sequence[str],
    options: GenerationOptions,
    *,
    at_once: int,
    show: Callable[[int], None],
) -> Counter[_Outcome]:
    """Draw all prompts. Stop and raise at the first error that would fail every other prompt too."""
    counts = Counter([_draw_first(client, prompts[0], options)])
    show(1)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for outcome in _in_turn(pool, lambda prompt: _draw(client, prompt, options), prompts[1:], at_once):
                counts[outcome] += 1
                show(counts.total())
        except BaseException:
            client.close()  # cancels the requests that are under way
            raise
    return counts


def _in_turn(
    pool: ThreadPoolExecutor, draw: Callable[[str], _Outcome], prompts: Sequence[str], at_once: int
) -> Iterator[_Outcome]:
    """Yield outcomes in order of completion, with at most `at_once` concurrent requests."""
    waiting = iter(prompts)
    running: set[Future[_Outcome]] = {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, at_once)}
    while running:
        done = next(as_completed(running))
        running.remove(done)
        yield done.result()
        running |= {pool.submit(draw, prompt) for prompt in itertools.islice(waiting, 1)}


def _draw_first(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    """Draw the first prompt twice, because the first request with new settings is not recorded."""
    outcome = _draw(client, prompt, options)
    if outcome is _Outcome.DRAWN:
        _draw(client, prompt, options | {"identical_results": False})
    return outcome


def _draw(client: Client, prompt: str, options: GenerationOptions) -> _Outcome:
    try:
        provenance = client.generate(prompt, **options).provenance
    except (InvalidRequest, NotFinite) as error:
        if any(item.field != _PROMPT for item in error.violations):
            raise  # the other prompts would fail likewise
        note(f"{prompt}: {'; '.join(item.description for item in error.violations) or error.message}")
        return _Outcome.FAILED
    return _Outcome.THERE if provenance.identical_job else _Outcome.DRAWN


@contextmanager
def _showing(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many pictures are done: as a bar on a terminal, else as some lines."""
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
    """A progress display that prints a line at each tenth of the work."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = 0

    def show(self, done: int) -> None:
        tenth = done * _LINES // self._total
        if tenth > self._shown:
            self._shown = tenth
            note(f"{done} of {self._total} prompts")


MOST_BYTES = 64 << 20


def read_prompt_file(file: Path) -> str:
    """Return the text of a file. End the command if it cannot be read, is too large or not UTF-8."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", status=2)
    except UnicodeDecodeError:
        fail(f"{file} is no UTF-8 text", "Give a file with one prompt a line.", status=2)
    if len(data) > MOST_BYTES:
        fail(f"{file} is larger than {MOST_BYTES >> 20} MiB", status=2)
    return text


def print_profiles(profiles: Sequence[CacheProfile], names: Mapping[str, str]) -> None:
    """Print profiles as a table, and how each was measured. `names` has the names of served models, by their hashes."""
    table = PlainTable("model", "fidelity", "words", *(f">{fraction:.0%}" for fraction in FRACTIONS), wraps=("model",))
    hashes = [profile.model_hash for profile in profiles]
    titles = {model_hash: names.get(model_hash, short_hash(model_hash)) for model_hash in hashes}
    for profile in profiles:
        for row in _rows(profile):
            table.add_row(titles[profile.model_hash], *row)
    table.add_caption("Columns: share of steps to skip. Values: the prompt similarity that this needs (-: never).")
    print_table(table)
    for profile in profiles:
        if profile.about:
            note(f"{titles[profile.model_hash]}: {profile.about}")


def _rows(profile: CacheProfile) -> Iterator[tuple[str, ...]]:
    for fidelity, classes in (("balanced", profile.balanced), ("fast", profile.fast)):
        yield from ((fidelity, *row) for row in _class_rows(classes.classes))


def _class_rows(classes: Sequence[LengthClass]) -> Iterator[tuple[str, ...]]:
    for length_class in classes:
        unbounded = "more" if len(classes) > 1 else "any"
        words = f"up to {length_class.max_words:.0f}" if math.isfinite(length_class.max_words) else unbounded
        thresholds = (length_class.thresholds.get(fraction) for fraction in FRACTIONS)
        yield (words, *("-" if similarity is None else f"{similarity:.3f}" for similarity in thresholds))

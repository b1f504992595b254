"""Draws deploy/architecture.svg, the services and the flows between them: `python deploy/architecture.py`.

The picture is text and the same on every machine, so that a test can compare it with the committed file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

TARGET = Path(__file__).with_name("architecture.svg")

WIDTH, HEIGHT = 1180, 925
_FONT = "Inter, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
_INK, _QUIET, _PAPER = "#1f2733", "#5b6675", "#ffffff"

Point = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A kind of arrow in the picture: what flows along it, and how it is drawn."""

    name: str
    colour: str
    width: float
    dashes: str
    """SVG's dash pattern of the line; "" for a solid line."""
    meaning: str
    """Its text in the legend."""


CALLS = Flow(name="calls", colour="#2563c4", width=2, dashes="", meaning="gRPC: calls and their answers")
JOINS = Flow(
    name="joins", colour="#7a8597", width=2, dashes="6 4", meaning="gRPC: joining the fleet, load, prefetching"
)
LINKS = Flow(name="links", colour="#d9730d", width=5, dashes="", meaning="tensor link: shared memory or TCP")
FILES = Flow(name="files", colour="#5b6675", width=2, dashes="", meaning="files on the gateway's disk")
HTTP = Flow(name="http", colour="#8a3ffc", width=2, dashes="", meaning="HTTP: pictures, jobs and their events")
FLOWS = (CALLS, HTTP, JOINS, LINKS, FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plate:
    """A process, or several of the same kind."""

    at: Point
    size: Point
    title: str
    lines: Sequence[str]
    fill: str
    edge: str
    behind: int = 0
    """Number of boxes that are drawn behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A line along points, with a head at its end and a label."""

    flow: Flow
    points: Sequence[Point]
    label: Sequence[str]
    label_at: Point
    anchor: str = "middle"
    """SVG's text-anchor of the label."""


BOXES = (
    Plate(
        at=(420, 30),
        size=(340, 92),
        title="Callers",
        lines=("your backend, the Python SDK,", "the bottega command, any gRPC client"),
        fill="#f4f6f9",
        edge="#9aa5b5",
    ),
    Plate(
        at=(130, 130),
        size=(220, 80),
        title="http",
        lines=("OpenAI's images API, jobs;", "stateless, port 8473"),
        fill="#f1e8fd",
        edge="#8a3ffc",
        behind=1,
    ),
    Plate(
        at=(420, 232),
        size=(340, 142),
        title="gateway",
        lines=(
            "API, admission, durable jobs,",
            "who gets which worker and when,",
            "who is in the fleet; no torch",
            "ports 8470 (callers), 8472 (services)",
        ),
        fill="#e6effb",
        edge="#2563c4",
    ),
    Plate(
        at=(40, 500),
        size=(290, 118),
        title="controlnet",
        lines=("ControlNets within a byte budget,", "shared by all workers,", "computed beside the base model"),
        fill="#fdf0e3",
        edge="#d9730d",
        behind=1,
    ),
    Plate(
        at=(455, 500),
        size=(270, 118),
        title="worker",
        lines=("one base model on one device:", "one running batch, a step a turn;", "codecs in their own processes"),
        fill="#e8f5ec",
        edge="#2f8a4f",
    ),
    Plate(
        at=(850, 500),
        size=(290, 118),
        title="loras",
        lines=("LoRAs: checked, canonical files,", "a tier in memory that workers", "of its machine share"),
        fill="#fdf0e3",
        edge="#d9730d",
    ),
    Plate(
        at=(850, 676),
        size=(290, 98),
        title="cache",
        lines=("latents of earlier pictures, which", "those of similar prompts start from"),
        fill="#fdf0e3",
        edge="#d9730d",
    ),
    Plate(
        at=(40, 676),
        size=(290, 98),
        title="activations",
        lines=("what blocks put out for images that", "are edited: in memory over the disk"),
        fill="#fdf0e3",
        edge="#d9730d",
    ),
    Plate(
        at=(40, 800),
        size=(290, 62),
        title="scale",
        lines=("as many workers as jobs need",),
        fill="#f1eefb",
        edge="#6b4fc4",
    ),
    Plate(
        at=(455, 800),
        size=(270, 62),
        title="worker",
        lines=("another one, perhaps its pair",),
        fill="#e8f5ec",
        edge="#2f8a4f",
        behind=1,
    ),
)

ARROWS = (
    Arrow(
        flow=CALLS,
        points=((540, 122), (540, 232)),
        label=("Generate, SubmitJob,", "WatchJob, GetImage"),
        label_at=(528, 172),
        anchor="end",
    ),
    Arrow(
        flow=CALLS,
        points=((640, 232), (640, 122)),
        label=("events, previews, pictures,", "provenance"),
        label_at=(652, 172),
        anchor="start",
    ),
    Arrow(
        flow=CALLS,
        points=((540, 374), (540, 500)),
        label=("attempts, cancellations,", "checkpoints to resume from"),
        label_at=(528, 432),
        anchor="end",
    ),
    Arrow(
        flow=CALLS,
        points=((640, 500), (640, 374)),
        label=("progress, checkpoints,", "previews, pictures"),
        label_at=(652, 432),
        anchor="start",
    ),
    Arrow(flow=HTTP, points=((420, 96), (240, 96), (240, 130)), label=("HTTP",), label_at=(330, 88)),
    Arrow(
        flow=CALLS,
        points=((240, 218), (240, 250), (420, 250)),
        label=("with the callers' keys",),
        label_at=(250, 242),
        anchor="start",
    ),
    Arrow(flow=FILES, points=((760, 262), (905, 262)), label=("jobs, pictures",), label_at=(832, 252)),
    Arrow(
        flow=CALLS,
        points=((420, 62), (90, 62), (90, 500)),
        label=("controlnets add, profile",),
        label_at=(255, 52),
    ),
    Arrow(
        flow=CALLS,
        points=((760, 62), (1090, 62), (1090, 500)),
        label=("loras add, pin, profile",),
        label_at=(925, 52),
    ),
    Arrow(
        flow=JOINS,
        points=((185, 500), (185, 322), (420, 322)),
        label=("join: what is hosted, how busy",),
        label_at=(298, 312),
    ),
    Arrow(flow=JOINS, points=((590, 500), (590, 374)), label=(), label_at=(0, 0)),
    Arrow(
        flow=JOINS,
        points=((420, 350), (240, 350), (240, 500)),
        label=("prefetch",),
        label_at=(330, 368),
    ),
    Arrow(
        flow=JOINS,
        points=((1000, 500), (1000, 330), (760, 330)),
        label=("join: its address, its load",),
        label_at=(884, 348),
    ),
    Arrow(
        flow=JOINS,
        points=((760, 358), (940, 358), (940, 500)),
        label=("names to digests,", "prefetch"),
        label_at=(850, 376),
    ),
    Arrow(flow=LINKS, points=((455, 536), (338, 536)), label=("latents",), label_at=(402, 524)),
    Arrow(flow=LINKS, points=((338, 590), (455, 590)), label=("residuals",), label_at=(396, 578)),
    Arrow(
        flow=JOINS,
        points=((1140, 725), (1162, 725), (1162, 318), (760, 318)),
        label=("cache: joins",),
        label_at=(1150, 650),
        anchor="end",
    ),
    Arrow(
        flow=JOINS,
        points=((40, 725), (18, 725), (18, 276), (420, 276)),
        label=("activations: joins, prefetch",),
        label_at=(30, 655),
        anchor="start",
    ),
    Arrow(
        flow=JOINS,
        points=((40, 831), (8, 831), (8, 264), (420, 264)),
        label=(),
        label_at=(0, 0),
    ),
    Arrow(flow=CALLS, points=((330, 831), (455, 831)), label=("starts, stops",), label_at=(392, 821)),
    Arrow(
        flow=LINKS,
        points=((470, 618), (470, 700), (330, 700)),
        label=("recordings",),
        label_at=(400, 690),
    ),
    Arrow(
        flow=LINKS,
        points=((330, 745), (505, 745), (505, 618)),
        label=("activations",),
        label_at=(412, 765),
    ),
    Arrow(flow=LINKS, points=((850, 548), (725, 548)), label=("LoRA weights",), label_at=(792, 534)),
    Arrow(
        flow=LINKS,
        points=((725, 578), (810, 578), (810, 700), (850, 700)),
        label=("embeddings,", "recordings"),
        label_at=(820, 641),
        anchor="start",
    ),
    Arrow(
        flow=LINKS,
        points=((850, 750), (775, 750), (775, 604), (725, 604)),
        label=("latents",),
        label_at=(767, 645),
        anchor="end",
    ),
    Arrow(
        flow=LINKS,
        points=((600, 618), (600, 800)),
        label=("latents of a pair",),
        label_at=(588, 782),
        anchor="end",
    ),
    Arrow(
        flow=LINKS,
        points=((680, 800), (680, 618)),
        label=("predicted noise",),
        label_at=(692, 782),
        anchor="start",
    ),
)


def svg() -> str:
    """Return the picture as SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="{_FONT}" role="img" aria-label="The services of Bottega and what flows between them">'
    )
    parts = [
        head,
        "<defs>",
        *(_head(flow) for flow in FLOWS),
        "</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="{_PAPER}"/>',
        *(line for arrow in ARROWS for line in _arrow(arrow)),
        *_disk((905, 214), (160, 96), ("jobs: SQLite", "pictures: files")),
        *(line for box in BOXES for line in _box(box)),
        *_legend((40, 802)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _head(flow: Flow) -> str:
    size = 4 if flow is LINKS else 8
    return (
        f'<marker id="{flow.name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" markerHeight="{size}"'
        f' orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{flow.colour}"/></marker>'
    )


def _box(box: Plate) -> Iterator[str]:
    (x, y), (width, height) = box.at, box.size
    for behind in range(box.behind, -1, -1):
        shift = 8 * behind
        yield (
            f'<rect x="{x + shift}" y="{y + shift}" width="{width}" height="{height}" rx="10" fill="{box.fill}"'
            f' stroke="{box.edge}" stroke-width="2"/>'
        )
    yield _text((x + width // 2, y + 27), box.title, size=18, weight=700)
    for number, line in enumerate(box.lines):
        yield _text((x + width // 2, y + 51 + 21 * number), line, size=14, colour=_QUIET)


def _disk(at: Point, size: Point, lines: Sequence[str]) -> Iterator[str]:
    (x, y), (width, height) = at, size
    style = f'fill="#f4f6f9" stroke="{FILES.colour}" stroke-width="2"'
    radius = width // 2
    yield (
        f'<path d="M{x} {y + 14} v{height - 28} a{radius} 14 0 0 0 {width} 0 v-{height - 28}" {style}/>'
        f'<ellipse cx="{x + radius}" cy="{y + 14}" rx="{radius}" ry="14" {style}/>'
    )
    for number, line in enumerate(lines):
        yield _text((x + radius, y + 52 + 20 * number), line, size=14, colour=_QUIET)


def _arrow(arrow: Arrow) -> Iterator[str]:
    path = " ".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(arrow.points))
    yield f'<path d="{path}" {_stroke(arrow.flow)} marker-end="url(#{arrow.flow.name})"/>'
    x, y = arrow.label_at
    for number, line in enumerate(arrow.label):
        yield _text((x, y + 18 * number), line, size=14, colour=arrow.flow.colour, anchor=arrow.anchor)


def _legend(at: Point) -> Iterator[str]:
    x, y = at
    for number, flow in enumerate(FLOWS):
        line_y = y + 28 * number
        yield f'<path d="M{x} {line_y} h44" {_stroke(flow)} marker-end="url(#{flow.name})"/>'
        yield _text((x + 58, line_y + 5), flow.meaning, size=14, colour=_QUIET, anchor="start")


def _stroke(flow: Flow) -> str:
    dashes = f' stroke-dasharray="{flow.dashes}"' if flow.dashes else ""
    return f'fill="none" stroke="{flow.colour}" stroke-width="{flow.width}" stroke-linejoin="round"{dashes}'


def _text(at: Point, text: str, *, size: int, weight: int = 400, colour: str = _INK, anchor: str = "middle") -> str:
    x, y = at
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    TARGET.write_text(svg())

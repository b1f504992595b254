"""What a LoRA store is asked: valid requests of its methods, and their fixed corpus, every field at its limits and one
past.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.message import Message
from safetensors.numpy import save

from bottega.miniature import WEIGHTS
from bottega.v1 import lora_pb2 as pb
from tests.fuzz.case import (
    BAD_DIGESTS,
    BAD_NAMES,
    INVALID,
    LEAST_INT32,
    MIB_TEXT,
    MOST_INT32,
    NOT_FOUND,
    OK,
    Case,
    asking,
    case_of,
    limits,
    shown,
)

ROOT = WEIGHTS / "loras"
FILE = ROOT / "dusk" / "dusk.safetensors"
"""The LoRA that is brought, below the root."""

NAME = "ink"
WORDS = (NAME, "miniature", str(FILE.relative_to(ROOT)))
"""Texts that mean something to the store."""

LOST = "lost"
"""One that the catalogue does not know, for those who look after quarantine."""

OF_QUARANTINE = frozenset({"RestoreLora", "DiscardLora"})
"""Methods whose requests have the id of one in quarantine for a digest."""

_BAD_WORDS = (["x"] * 17, [""], ["x" * 201], ["\0"])


def registered(**facts: Any) -> pb.RegisterLoraRequest:
    """Brings "ink"; again, it changes nothing."""
    whole = {"name": NAME, "base": "miniature", "path": str(FILE.relative_to(ROOT)), "trigger_words": ["ink"]}
    return pb.RegisterLoraRequest(**{**whole, **facts})


def valid(method: str, digest: str) -> list[Message]:
    """Requests that are taken; of UploadLora the messages of one. digest: of the canonical form of "ink"."""
    match method:
        case "UploadLora":
            return [pb.UploadLoraRequest(head=_head()), pb.UploadLoraRequest(chunk=FILE.read_bytes())]
        case "RegisterLora":
            return [registered()]
        case "ListLoras":
            return [pb.ListLorasRequest(), pb.ListLorasRequest(page_size=9, page_token="a", base="miniature")]
        case "PrefetchLoras":
            digests = ["ab" * 32, digest]
            return [pb.PrefetchLorasRequest(digests=digests, only_keep=keep) for keep in (False, True)]
        case "SetLoraProfile":
            bounds = [pb.LoraBound(num_inference_steps=30, max_step=6)]
            return [pb.SetLoraProfileRequest(name=NAME, digest=digest, bounds=bounds)]
        case "ListQuarantine":
            return [pb.ListQuarantineRequest(), pb.ListQuarantineRequest(page_size=9, page_token=digest)]
        case "RestoreLora":
            whole = pb.RestoreLoraRequest(id=digest, name=LOST, base="miniature")
            return [whole, pb.RestoreLoraRequest(id=digest)]
        case "DiscardLora":
            return [pb.DiscardLoraRequest(id=digest)]
        case _:
            return [getattr(pb, f"{method}Request")(name=NAME)]


def lora_store_corpus(digest: str) -> Iterator[Case]:
    """digest: of the canonical form of "ink", which is there; the last case takes it away."""
    yield from _brought()
    yield from _uploads()
    yield from _lists()
    yield from _named()
    yield from _digests()
    yield from _profiles(digest)
    yield from _quarantine()
    yield case_of("DeleteLora", "one that is there", pb.DeleteLoraRequest(name=NAME))


def _brought() -> Iterator[Case]:
    """What is said of a LoRA, whichever way it comes."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        *(("name", {"name": name}) for name in BAD_NAMES),
        *(("base", {"base": base}) for base in ("", "nobody", MIB_TEXT)),
        *(("trigger_words", {"trigger_words": words}) for words in _BAD_WORDS),
    ]
    for field, facts in wrong:
        yield case_of("RegisterLora", f"{field} {shown(facts[field])}", registered(**facts), INVALID, field)
        yield _upload(f"{field} {shown(facts[field])}", [pb.UploadLoraRequest(head=_head(**facts))], field)
    most = registered(name="x" * 200, trigger_words=["x" * 200] * 16, allow_partial=True)
    yield case_of("RegisterLora", "sixteen long words, and layers that may be ignored", most)
    yield case_of("RegisterLora", "nothing at all", pb.RegisterLoraRequest(), INVALID, "name", "base", "path")


def _uploads() -> Iterator[Case]:
    head, data = pb.UploadLoraRequest(head=_head()), FILE.read_bytes()
    whole = pb.UploadLoraRequest(chunk=data)
    peft = _peft_file()
    facts: dict[str, Any] = {"name": "peft", "trigger_words": ["x" * 200] * 16, "adapter_config": b"{}".ljust(1 << 20)}
    facts |= {"base_model": "x" * 200, "allow_partial": True}
    said = pb.UploadLoraRequest(head=_head(peft, **facts))
    raw = (said.SerializeToString(), pb.UploadLoraRequest(chunk=peft).SerializeToString())
    yield Case(method="UploadLora", name="a file with all that may be said of it", raw=raw, code=OK)
    yield _upload("no message", [], "head")
    yield _upload("no head", [whole], "head")
    yield _upload("two heads", [head, head], "chunk")
    yield _upload("a byte too few", [head, pb.UploadLoraRequest(chunk=data[:-1])], "chunk")
    yield _upload("a byte too many", [head, whole, pb.UploadLoraRequest(chunk=b"\0")], "chunk")
    yield _upload("another hash", [pb.UploadLoraRequest(head=_head(sha256="a" * 64)), whole])
    junk = b"\xff" * len(data)
    yield _upload("no LoRA", [pb.UploadLoraRequest(head=_head(junk)), pb.UploadLoraRequest(chunk=junk)])
    wrong: list[tuple[str, dict[str, Any]]] = [
        *(("sha256", {"sha256": text}) for text in BAD_DIGESTS),
        *(("size_bytes", {"size_bytes": size}) for size in (0, -1, (4 << 30) + 1, 2**63 - 1)),
        ("adapter_config", {"adapter_config": b" " * ((1 << 20) + 1)}),
        ("base_model", {"base_model": "x" * 201}),
    ]
    for field, facts in wrong:
        yield _upload(f"{field} {shown(facts[field])}", [pb.UploadLoraRequest(head=_head(**facts)), whole], field)
    # .4 KB: regular expressions as PEFT runs them would take hours.
    config = json.dumps({"alpha_pattern": {"(.*.*.*)*x" * 40: 1}}).encode()
    yield _upload("an expression that takes hours", [pb.UploadLoraRequest(head=_head(adapter_config=config)), whole])
    yield from _parts(whole)


def _peft_file() -> bytes:
    """Return an adapter_model.safetensors of PEFT for one module of the embedded model's UNet, of PEFT's own rank."""
    module = "base_model.model.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    rank, width = 8, 96
    down, up = np.full((rank, width), 0.01, dtype=np.float32), np.full((width, rank), 0.01, dtype=np.float32)
    return save({f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up})


def _parts(whole: pb.UploadLoraRequest) -> Iterator[Case]:
    """Of uploads that bring several files."""
    size = len(whole.chunk)

    def part(component: str = "unet", size_bytes: int = size, **facts: Any) -> pb.UploadLoraPart:
        return pb.UploadLoraPart(component=component, size_bytes=size_bytes, **facts)

    peft = _peft_file()
    for configuration, code in ((b"", INVALID), (b"{}".ljust(1 << 20), OK)):
        parts = [part(size_bytes=len(peft), adapter_config=configuration)]
        head = pb.UploadLoraRequest(head=_head(peft, name="peft", parts=parts))
        raw = (head.SerializeToString(), pb.UploadLoraRequest(chunk=peft).SerializeToString())
        yield Case(method="UploadLora", name=f"a part with {len(configuration)} bytes beside it", raw=raw, code=code)
    long = b" " * ((1 << 20) + 1)
    wrong: dict[str, tuple[list[pb.UploadLoraPart], set[str]]] = {
        "of no component": ([part("")], {"parts"}),
        "of an unknown component": ([part("vae")], {"parts"}),
        "of one twice": ([part(size_bytes=size - 1), part(size_bytes=1)], {"parts"}),
        "many": ([part("x")] * 10_000, {"parts"}),
        "too few bytes": ([part(size_bytes=size - 1)], {"size_bytes"}),
        "too many bytes": ([part(), part("text_encoder", 1)], {"size_bytes"}),
        "no bytes": ([part(size_bytes=0)], {"parts[0].size_bytes", "size_bytes"}),
        "negative bytes": ([part(size_bytes=size + 1), part("text_encoder", -1)], {"parts[1].size_bytes"}),
        "2^63 - 1 bytes": ([part(size_bytes=2**63 - 1)], {"size_bytes"}),
        "a long configuration": ([part(adapter_config=long)], {"parts[0].adapter_config"}),
    }
    for name, (parts, fields) in wrong.items():
        yield _upload(f"parts: {name}", [pb.UploadLoraRequest(head=_head(parts=parts)), whole], *fields)
    both = _head(parts=[part()], adapter_config=b"{}")
    yield _upload("parts beside a configuration", [pb.UploadLoraRequest(head=both), whole], "adapter_config")


def _lists() -> Iterator[Case]:
    paths = ("", "/", "..", "/etc", "nobody", "\0", "x" * 4096, "x" * 4097, "~", "$HOME")
    yield from limits(asking("RegisterLora", registered), "path", (), paths)
    for method, fields in (("ListLoras", ("page_token", "base")), ("ListQuarantine", ("page_token",))):
        case = asking(method, getattr(pb, f"{method}Request"))
        yield from limits(case, "page_size", (0, 1, 1000), (-1, 1001, MOST_INT32, LEAST_INT32))
        for field in fields:
            yield from limits(case, field, ("x" * 200,), ("x" * 201,))


def _named() -> Iterator[Case]:
    for method in ("GetLora", "PinLora", "DeleteLora"):
        case = asking(method, getattr(pb, f"{method}Request"))
        yield case("an unknown name", NOT_FOUND, name="nobody")
        yield from limits(case, "name", (), BAD_NAMES)
    yield case_of("GetLora", "one of a long name", pb.GetLoraRequest(name="x" * 200))
    yield case_of("GetLora", "one of a tenant's long name", pb.GetLoraRequest(name=f"{'x' * 195}@shop"), NOT_FOUND)
    yield from limits(asking("PinLora", pb.PinLoraRequest, name=NAME), "pinned", (True, False))


def _digests() -> Iterator[Case]:
    case = asking("PrefetchLoras", pb.PrefetchLorasRequest)
    yield from limits(case, "digests", ([], ["a" * 64] * 256, ["\0"], [MIB_TEXT]), (["a" * 64] * 257,))
    yield from limits(case, "only_keep", (False, True), digests=["a" * 64])


def _profiles(digest: str) -> Iterator[Case]:
    def measured(*bounds: tuple[int, int], name: str = NAME, of: str = digest) -> pb.SetLoraProfileRequest:
        made = [pb.LoraBound(num_inference_steps=steps, max_step=step) for steps, step in bounds]
        return pb.SetLoraProfileRequest(name=name, digest=of, bounds=made)

    for bound in ((1, 0), (1, 1), (200, 200)):
        yield case_of("SetLoraProfile", f"{bound}", measured(bound))
    yield case_of("SetLoraProfile", "sixteen bounds", measured(*((steps, 1) for steps in range(1, 17))))
    for steps in (0, -1, 201, 2**31 - 1):
        field = "bounds[0].num_inference_steps"
        fields = [field] if steps >= 0 else [field, "bounds[0].max_step"]
        yield case_of("SetLoraProfile", f"of {steps} steps", measured((steps, 0)), INVALID, *fields)
    for step in (-1, 31, 2**31 - 1):
        yield case_of("SetLoraProfile", f"at {step} of 30", measured((30, step)), INVALID, "bounds[0].max_step")
    for name, bounds in {"seventeen": [(steps, 1) for steps in range(1, 18)], "the same twice": [(9, 1)] * 2}.items():
        yield case_of("SetLoraProfile", f"bounds: {name}", measured(*bounds), INVALID, "bounds")
    yield case_of("SetLoraProfile", "another version", measured((9, 1), of="ab"), NOT_FOUND)
    yield case_of("SetLoraProfile", "an unknown name", measured((9, 1), name="nobody"), NOT_FOUND)
    for name in BAD_NAMES:
        yield case_of("SetLoraProfile", f"name {shown(name)}", measured((9, 1), name=name), INVALID, "name")


def _quarantine() -> Iterator[Case]:
    nobody = "a" * 64
    restored = asking("RestoreLora", pb.RestoreLoraRequest, id=nobody)
    discarded = asking("DiscardLora", pb.DiscardLoraRequest)
    yield restored("nobody, and all that may be said of it", NOT_FOUND, name="x" * 200, base="miniature")
    yield discarded("nobody", NOT_FOUND, id=f"{nobody}.{'0' * 16}")
    bad = (*BAD_DIGESTS, "../../etc/passwd", f"{nobody}.", f"{nobody}.{'0' * 15}", f"{nobody}.{'G' * 16}")
    for case in (restored, discarded):
        yield from limits(case, "id", (), bad)
    yield from limits(restored, "name", (), BAD_NAMES[1:])
    yield from limits(restored, "base", (), ("nobody", MIB_TEXT))


def _upload(name: str, messages: list[pb.UploadLoraRequest], *fields: str) -> Case:
    raw = tuple(message.SerializeToString() for message in messages)
    return Case(method="UploadLora", name=name, raw=raw, code=INVALID, fields=frozenset(fields))


def _head(data: bytes | None = None, **facts: Any) -> pb.UploadLoraHead:
    data = FILE.read_bytes() if data is None else data
    whole = {"name": "up", "base": "miniature", "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    return pb.UploadLoraHead(**{**whole, **facts})

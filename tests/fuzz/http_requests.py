"""Random requests to every route of the HTTP API: none may end its process, get a 500, or an answer in another form."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
import httpx
from pydantic import ValidationError

from bottega.http.answers import ErrorAnswer
from bottega.http.bodies import BottegaBody
from bottega.http.operations import OPERATIONS, Operation

_WAIT_S = 60.0
# Most drawings: what they ask for is fuzzed, not the time that it takes.
_STEPS = {"num_inference_steps": 1}
_VALUES: Sequence[object] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, "", "a", "\x00", "\ud7ff", "é" * 2000, "64x64",
    "0x0", "99999x99999", "png", "btg_", [], {}, [None], {"a": 1}, [[[[]]]], "data:image/png;base64,AAAA", "AAAA", "%",
    "https://127.0.0.1/", "HTTPS://[::1", "http://\x00", "https://a@b:99999/\ud7ff", "https://" + "a." * 900,
    [{"name": "a", "image": "https://169.254.169.254/"}], [{"name": "dusk"}] * 9,
)  # fmt: skip
_TEXTS = ("", "a", "%00", "%2e%2e%2f", "..", "é", "x" * 300, "-1", "0", "1", "99999999999999999999", "unknown", "%ff")
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)
_HEADERS: Sequence[tuple[str, str]] = (
    ("idempotency-key", "\x7f"),
    ("idempotency-key", "x" * 200),
    ("last-event-id", "steps-1"),
    ("range", "bytes=9-1"),
    ("range", "bytes=-0"),
    ("range", "lines=1-2"),
    ("if-none-match", "*"),
    ("content-type", "multipart/form-data"),
    ("content-type", "multipart/form-data; boundary=" + "b" * 300),
    ("content-type", "multipart/form-data; boundary=b; charset=nonsense"),
    ("content-type", "application/json; charset=nonsense"),
    ("authorization", "Bearer " + "x" * 2000),
    ("authorization", "Basic \xff"),
    ("host", "evil.example"),
    ("origin", "null"),
    ("accept", "\x01"),
    ("content-length", "5"),
    ("transfer-encoding", "chunked"),
)
_RAW = (
    b"",
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%zz%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@dataclass(slots=True, kw_only=True)
class Answers:
    """What was answered, by status, and which answers no request may get."""

    statuses: Counter[int] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)


def fuzz_http(address: str, requests: int, seed: int) -> Answers:
    """Send so many random requests to every operation of the HTTP API at `address`, and some that are no HTTP."""
    answers, chance = Answers(), random.Random(seed)
    with httpx.Client(base_url=f"http://{address}", timeout=_WAIT_S) as client:
        kept = client.post("/v1/jobs", json={"prompt": "a circle", "model": "miniature", "bottega": _STEPS})
        assert kept.is_success, kept.text
        job_id = str(kept.json()["id"])
        for operation in OPERATIONS:
            for _ in range(requests):
                _send(client, operation, job_id, chance, answers)
        for raw in _RAW:
            _send_raw(address, raw)
        if client.get("/healthz").text != "ok\n":
            answers.found.append("the service is not well")
    return answers


def _send(client: httpx.Client, operation: Operation, job_id: str, chance: random.Random, answers: Answers) -> None:
    path = operation.path
    for name in ("job_id", "index", "model", "token"):
        known = {"job_id": job_id, "index": "0", "model": "miniature"}.get(name, "a")
        value = known if chance.random() < 0.5 and operation.method != "DELETE" else chance.choice(_TEXTS)
        path = path.replace(f"{{{name}}}", value)
    query = {name: chance.choice(_TEXTS) for name in _names(operation.query) if chance.random() < 0.3}
    headers = dict(chance.sample(_HEADERS, chance.choice((0, 0, 1, 2))))
    content: dict[str, Any] = {}
    if operation.body is not None:
        content = _content(operation, chance)
    try:
        request = client.build_request(operation.method, path, params=query, headers=_bytes(headers), **content)
        answer = client.send(request)
    except (httpx.InvalidURL, httpx.LocalProtocolError, h11.LocalProtocolError, ValueError):
        return  # the client itself refuses to send it
    except httpx.TransportError:
        answers.statuses[0] += 1  # the server ended the connection, as of a body that contradicts its length
        return
    answers.statuses[answer.status_code] += 1
    if fault := _fault(answer):
        answers.found.append(f"{operation.method} {path} {headers} {request.read()[:400]!r}: {fault}")


def _bytes(headers: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode("latin-1") for name, value in headers.items()}


def _fault(answer: httpx.Response) -> str:
    if answer.status_code >= 500 and answer.status_code not in (501, 503, 504):
        return f"status {answer.status_code}, {answer.text[:200]}"
    if answer.status_code < 400 or not answer.content:
        return ""
    if answer.headers["content-type"] != "application/json":
        return "" if answer.status_code == 400 else f"{answer.status_code} is {answer.headers['content-type']}"
    try:
        ErrorAnswer.model_validate_json(answer.content)
    except ValidationError as error:
        return f"no error in OpenAI's form: {error}"
    return ""


def _names(model: Any) -> Iterator[str]:
    yield from model.model_fields if model is not None else ()
    yield from ("unknown",) if model is not None else ()


def _content(operation: Operation, chance: random.Random) -> dict[str, Any]:
    body = _body(operation, chance)
    if operation.path != "/v1/images/edits":
        if chance.random() < 0.1:
            return {"content": chance.choice((b"", b"[", b"null", b"\xff", b"[" * 10_000, b'{"a":' * 5_000))}
        return {"json": body}
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    form["bottega"] = json.dumps({**_STEPS, "strength": 0.1})
    if chance.random() < 0.3:
        form[chance.choice(("bottega[seed]", "bottega[", "a[b][c][d][e][f]", "[]", "prompt[]", "n[]"))] = "1"
    if chance.random() < 0.2:
        form[chance.choice(("image", "image[]", "mask", "image[url]"))] = chance.choice(("https://[::1]/", "AAAA", "?"))
    files = [(chance.choice(("image", "image[]", "mask", "other")), ("a", chance.choice((_PNG, b"", b"GIF89a"))))]
    return {"data": form, "files": files}


def _body(operation: Operation, chance: random.Random) -> dict[str, object]:
    assert operation.body is not None
    body: dict[str, object] = {"prompt": "a circle"}
    for name in operation.body.model_fields:
        if chance.random() < 0.12:
            body[name] = chance.choice(_VALUES)
    own: dict[str, object] = dict(_STEPS)
    for name in BottegaBody.model_fields:
        if chance.random() < 0.06 and name != "num_inference_steps":
            own[name] = chance.choice(_VALUES)
    if "bottega" not in body:
        body["bottega"] = own
    body["n"] = body.get("n", 1) if chance.random() < 0.3 else 1
    return body


def _send_raw(address: str, raw: bytes) -> None:
    """Send bytes that may be no request, and read what comes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_WAIT_S) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except ConnectionError:
            return

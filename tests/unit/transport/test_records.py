"""Sealed records: whatever is done to them on their way is found out, and what is whole arrives as it was."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import BadFrame
from bottega.transport.backends import records
from bottega.transport.backends.records import RECORD_BYTES, Records, SealKeys
from bottega.transport.handshake.messages import seal_keys

A, B = os.urandom(32), os.urandom(32)


def ends() -> tuple[Records, Records]:
    return Records(SealKeys(ours=A, theirs=B)), Records(SealKeys(ours=B, theirs=A))


def sent(sender: Records, *pieces: bytes) -> list[bytes]:
    return [bytes(record) for record in sender.seal_all([memoryview(piece) for piece in pieces])]


def received(receiver: Records, wire: bytes, most: int) -> bytes:
    """What comes out where so many bytes come at a time at most, and the receiver asks for as many."""
    out, at = b"", 0
    target = bytearray(most)
    while at < len(wire) or receiver.waiting:
        if receiver.waiting:
            got = receiver.take(memoryview(target))
        else:
            wanted = receiver.wanted
            count = min(len(wanted), most, len(wire) - at)
            wanted[:count] = wire[at : at + count]
            at += count
            got = receiver.received(count, memoryview(target))
        out += target[:got]
    return out


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=3000), max_size=8), most=st.integers(1, 4000))
def test_what_was_sent_arrives_however_it_was_cut(pieces: list[bytes], most: int) -> None:
    sender, receiver = ends()
    for _ in range(2):
        assert received(receiver, b"".join(sent(sender, *pieces)), most) == b"".join(pieces)


@pytest.mark.parametrize("most", [4096, 1 << 20])
def test_large_pieces_are_several_records(most: int) -> None:
    sender, receiver = ends()
    data = random.Random(0).randbytes(3 * RECORD_BYTES + 17)
    wire = sent(sender, b"head", data, b"tail")
    assert len(wire) == 6
    assert data[:1000] not in b"".join(wire)
    assert received(receiver, b"".join(wire), most) == b"head" + data + b"tail"


@pytest.mark.parametrize("kind", ["flip", "repeat", "leave out", "swap", "truncate and go on", "other direction"])
def test_tampered_streams_are_all_found_out(kind: str) -> None:
    chance = random.Random(kind)
    sender, _ = ends()
    wire = [bytes(sender.seal(chance.randbytes(20))) for _ in range(5)]
    for _ in range(1000):
        tampered = list(wire)
        at = chance.randrange(4)
        match kind:
            case "flip":
                record = bytearray(tampered[at])
                record[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
                tampered[at] = bytes(record)
            case "repeat":
                tampered.insert(chance.randrange(at + 1, 5), tampered[at])
            case "leave out":
                del tampered[at]
            case "swap":
                other = chance.choice([each for each in range(5) if each != at])
                tampered[at], tampered[other] = tampered[other], tampered[at]
            case "truncate and go on":
                tampered[at] = tampered[at][: chance.randrange(len(tampered[at]))]
        receiver = Records(SealKeys(ours=A, theirs=B)) if kind == "other direction" else ends()[1]
        with pytest.raises(BadFrame):
            _until_the_end(receiver, b"".join(tampered))


def _until_the_end(receiver: Records, wire: bytes) -> None:
    """Raises BadFrame also where bytes are missing at the end: a frame would be."""
    if len(received(receiver, wire, 4096)) != 100 or len(receiver.wanted) != 4:
        raise BadFrame("half a record")


def test_no_two_records_have_the_same_nonce_and_no_two_connections_the_same_key() -> None:
    sender, _ = ends()
    assert len({bytes(sender.seal(b"the same")) for _ in range(100)}) == 100
    token = os.urandom(32)
    one = seal_keys(token, b"request", b"answer", connecting=True)
    assert one == SealKeys(ours=one.ours, theirs=one.theirs)
    other = seal_keys(token, b"request", b"answer", connecting=False)
    assert (one.ours, one.theirs) == (other.theirs, other.ours)
    assert one.ours != one.theirs
    assert seal_keys(token, b"request", b"another", connecting=True).ours != one.ours
    assert seal_keys(os.urandom(32), b"request", b"answer", connecting=True).ours != one.ours


def test_a_length_that_no_record_has_is_refused_before_anything_is_kept() -> None:
    _, receiver = ends()
    for length in (0, 16, RECORD_BYTES + 17, 2**32 - 1):
        receiver = ends()[1]
        receiver.wanted[:] = length.to_bytes(4, "little")
        assert receiver.received(4, memoryview(bytearray(10))) == 0
        with pytest.raises(BadFrame, match="not a sealed record"):
            receiver.wanted  # noqa: B018 - a property that checks
    assert len(receiver._incoming) == RECORD_BYTES + 2 * records._HEADER_BYTES + records._TAG_BYTES


def test_the_next_header_comes_with_a_record_and_is_not_counted_as_missing() -> None:
    sender, receiver = ends()
    wire = b"".join(sent(sender, bytes(100))) + b"".join(sent(sender, bytes(50)))
    target = memoryview(bytearray(200))
    sizes = []
    while wire:
        wanted = receiver.wanted
        sizes.append((receiver.missing, len(wanted)))
        count = min(len(wanted), len(wire))
        wanted[:count], wire = wire[:count], wire[count:]
        receiver.received(count, target)
    assert sizes == [(4, 4), (116, 120), (66, 70)]

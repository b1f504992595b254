"""Texts in the metadata of pictures: the parameters that draw a picture again, and the summary that other tools show.

A PNG has each as a text chunk. JPEG and WebP have them in EXIF data: the summary in UserComment, where AUTOMATIC1111's
web UI and its readers have it, and the parameters in MakerNote, which is for the program that made a picture. The EXIF
data of a JPEG has less than 64 KiB: longer parameters stand in segments of their own, and a longer summary is left out.

Files are untrusted when they are read. Pillow reads every entry of EXIF data, and entries may overlap: a MiB of them
would take gigabytes. So `read_exif_texts` only follows the entries that it needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

PARAMETERS_KEYWORD = "bottega"
"""Keyword of the text with a GenerationSpec as JSON, which `bottega generate --like` reads."""
SUMMARY_KEYWORD = "parameters"
"""Keyword of the text that other tools show, in the format of AUTOMATIC1111's web UI."""

# Tags of EXIF 2.32: the pointer to the directory of EXIF data, and two of its values.
_EXIF_IFD, _MAKER_NOTE, _USER_COMMENT = 0x8769, 0x927C, 0x9286
_EXIF_HEAD = b"Exif\0\0"
# The size of one JPEG segment.
_MAX_JPEG_EXIF_BYTES = 65_533
_UTF_16_HEAD = b"UNICODE\0"
_MAKER_HEAD = b"bottega\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_LONG, _BYTES = 4, frozenset({1, 2, 7})
# Cameras write about a hundred entries.
_MOST_ENTRIES = 1024
_MOST_SEGMENTS = 256
_JPEG_SIGNATURE, _APP1, _APP13, _SOS = b"\xff\xd8", 0xE1, 0xED, 0xDA


def exif_with(texts: Mapping[str, str], *, is_jpeg: bool) -> bytes:
    """Return EXIF data with texts by keyword; b"" for none, or if a JPEG has no room for them."""
    from PIL import Image

    summary, parameters = texts.get(SUMMARY_KEYWORD), texts.get(PARAMETERS_KEYWORD)
    values = {}
    if parameters is not None:
        values[_MAKER_NOTE] = _MAKER_HEAD + parameters.encode()
    if summary is not None:
        values[_USER_COMMENT] = _UTF_16_HEAD + summary.encode("utf-16-be")
    for left_out in (0, _USER_COMMENT, _MAKER_NOTE):
        kept = {tag: value for tag, value in values.items() if tag != left_out}
        if not kept:
            continue
        exif = Image.Exif()
        exif.get_ifd(_EXIF_IFD).update(kept)
        data = exif.tobytes()
        if not is_jpeg or len(data) <= _MAX_JPEG_EXIF_BYTES:
            return data
    return b""


def jpeg_segments_with(texts: Mapping[str, str], exif: bytes) -> bytes:
    """Return JPEG segments with the parameters; b"" if there are none, or they are in the EXIF data."""
    parameters = texts.get(PARAMETERS_KEYWORD, "").encode()
    if _MAKER_HEAD + parameters in exif:
        return b""
    room = _MAX_JPEG_EXIF_BYTES - len(_MAKER_HEAD)
    parts = [_MAKER_HEAD + parameters[at : at + room] for at in range(0, len(parameters), room)]
    return b"".join(bytes([0xFF, _APP13]) + (2 + len(part)).to_bytes(2, "big") + part for part in parts)


def read_exif_texts(data: bytes) -> Mapping[str, str]:
    """Return the texts in the EXIF data of a JPEG or WebP file, by keyword. Damaged data has none."""
    exif, own = _jpeg_exif(data) if data.startswith(_JPEG_SIGNATURE) else (_webp_exif(data), b"")
    try:
        values = dict(_values(exif.removeprefix(_EXIF_HEAD)))
    except struct.error:  # the data ends before what it points to
        values = {}
    texts = {}
    note, comment = _MAKER_HEAD + own if own else values.get(_MAKER_NOTE, b""), values.get(_USER_COMMENT, b"")
    if note.startswith(_MAKER_HEAD):
        texts[PARAMETERS_KEYWORD] = note.removeprefix(_MAKER_HEAD).decode(errors="replace")
    if comment.startswith(_UTF_16_HEAD):
        texts[SUMMARY_KEYWORD] = comment.removeprefix(_UTF_16_HEAD).decode("utf-16-be", errors="replace")
    return texts


def _jpeg_exif(data: bytes) -> tuple[bytes, bytes]:
    """Return the EXIF data of a JPEG, and the parameters in segments of their own."""
    at, exif, own = len(_JPEG_SIGNATURE), b"", []
    for _ in range(_MOST_SEGMENTS):
        if data[at : at + 1] != b"\xff" or data[at + 1 : at + 2] in (b"", bytes([_SOS])):
            break
        end = at + 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
        if data[at + 1] == _APP1 and data.startswith(_EXIF_HEAD, at + 4):
            exif = exif or data[at + 4 : end]
        elif data[at + 1] == _APP13 and data.startswith(_MAKER_HEAD, at + 4):
            own.append(data[at + 4 + len(_MAKER_HEAD) : end])
        at = end
    return exif, b"".join(own)


def _webp_exif(data: bytes) -> bytes:
    at = 12  # behind RIFF, the size of what follows, and WEBP
    for _ in range(_MOST_SEGMENTS):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind == b"EXIF":
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return b""


def _values(exif: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the values of MakerNote and UserComment. Raise struct.error if the data is damaged."""
    order = _BYTE_ORDERS.get(exif[:4])
    if order is None:
        return
    (first,) = struct.unpack_from(f"{order}I", exif, 4)
    for tag, kind, _, directory in _entries(exif, order, first):
        if tag != _EXIF_IFD or kind != _LONG:
            continue
        for inner_tag, inner_kind, size, at in _entries(exif, order, directory):
            if inner_tag in (_MAKER_NOTE, _USER_COMMENT) and inner_kind in _BYTES and size > 4:
                yield inner_tag, exif[at : at + size]
        return


def _entries(exif: bytes, order: str, at: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, type, count and value of the entries of a directory."""
    (count,) = struct.unpack_from(f"{order}H", exif, at)
    for number in range(min(count, _MOST_ENTRIES)):
        yield struct.unpack_from(f"{order}HHII", exif, at + 2 + 12 * number)

"""Tokens of pages of jobs: each says the sequence of the last job before its page."""

from __future__ import annotations

import base64
import binascii

from bottega.errors import InvalidRequest, Violation


def token_of(sequence: int) -> str:
    """The token of the page after that job."""
    return base64.urlsafe_b64encode(sequence.to_bytes(8, "big")).decode()


def sequence_of(token: str) -> int:
    """The sequence that a token says. Raises InvalidRequest for one that was not given out."""
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    sequence = int.from_bytes(raw, "big")
    if len(raw) != 8 or sequence >= 1 << 63:
        rule = "must be the next_page_token of an earlier answer"
        raise InvalidRequest(f"page_token: {rule}", violations=[Violation(field="page_token", description=rule)])
    return sequence

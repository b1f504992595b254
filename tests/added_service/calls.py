"""What the store of colours is called with by gRPC, and which colours it keeps."""

from __future__ import annotations

from bottega.v1.controlnet_pb2 import PrefetchRequest, PrefetchResponse

SERVICE = "tests.ColourService"
COLOURS = {"red": 0xFF0000, "green": 0x00FF00, "blue": 0x0000FF}
ASK, ANSWER = "ask", "answer"
"""Kinds of messages on a link: the number of a colour in their order, and the colour."""

__all__ = ["ANSWER", "ASK", "COLOURS", "SERVICE", "PrefetchRequest", "PrefetchResponse"]

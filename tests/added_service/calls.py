"""The words of the store of colours: its messages, its gRPC service, its links, and which colours it keeps."""

from __future__ import annotations

import grpc

messages = grpc.protos("tests/added_service/colours.proto")

SERVICE = "tests.ColourService"
COLOURS = {"red": 0xFF0000, "green": 0x00FF00, "blue": 0x0000FF}
ASK, ANSWER = "ask", "answer"
"""Kinds of messages on a link: the number of a colour in their order, and the colour."""

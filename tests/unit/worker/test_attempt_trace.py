"""What a worker says of one attempt: the front's times and the engine's, since it began."""

from __future__ import annotations

import time

from bottega.v1.trace_pb2 import Span, Trace
from bottega.worker.attempt_runner import AttemptTrace


def test_times_count_from_the_beginning_of_the_attempt_and_are_in_their_order() -> None:
    before_ns = time.monotonic_ns()
    trace = AttemptTrace()
    began_ns = time.monotonic_ns()
    trace.add("encode image 0", began_s=began_ns / 1e9 + 3.0, seconds=0.25)
    trace.take(
        Trace(
            spans=[
                Span(name="step 0", track="denoise", begin_ns=began_ns + 10**9, duration_ns=7, facts={"a": "b"}),
                Span(name="residuals", service="nets", begin_ns=began_ns + 2 * 10**9),
            ],
            dropped=4,
        )
    )
    message = trace.message()
    assert [(span.name, span.service) for span in message.spans] == [
        ("step 0", ""),
        ("residuals", "nets"),
        ("encode image 0", ""),
    ]
    slack_ns = began_ns - before_ns + 1000
    for span, expected_ns in zip(message.spans, (10**9, 2 * 10**9, 3 * 10**9), strict=True):
        assert 0 <= span.begin_ns - expected_ns + 1000 <= slack_ns + 2000
    assert (message.spans[0].duration_ns, message.spans[2].duration_ns) == (7, 250_000_000)
    assert dict(message.spans[0].facts) == {"a": "b"}
    assert message.dropped == 4

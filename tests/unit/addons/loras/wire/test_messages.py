"""What a LoRA store says of its own work, beside a LoRA: as it was said, or not at all."""

from __future__ import annotations

import pytest

from bottega.addons.loras.wire import messages
from bottega.v1.trace_pb2 import StoreTimes

ALL = StoreTimes(**{field.name: 0.1 for field in StoreTimes.DESCRIPTOR.fields})


@pytest.mark.parametrize("times", [StoreTimes(), StoreTimes(read_s=0.5), ALL], ids=["none", "one", "all"])
def test_times_come_as_they_were_sent_and_all_messages_have_one_layout(times: StoreTimes) -> None:
    message = messages.whole_message(7, times)
    assert message.layout == messages.whole_message(8, StoreTimes()).layout
    assert messages.read_whole(message.layout, [memoryview(each) for each in message.buffers]) == (7, times)


@pytest.mark.parametrize("packed", [b"\x02\xff\xff", b"\xff" * 64, messages.pack_times(StoreTimes(read_s=-1.0))])
def test_what_are_no_times_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"times|spent"):
        messages.read_times(memoryview(packed))

"""What the engine asks of the device that it computes on: streams, events, copies and memory, the same way on a CPU."""

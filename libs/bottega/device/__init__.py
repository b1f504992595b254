"""The device that an engine computes on: streams, events, copies and memory, with one interface for CPUs and GPUs."""

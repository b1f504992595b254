"""The memory of messages: slots, sealed shared memory, sealed files, and copies between buffers."""

"""Memory that messages lie in: slots, sealed shared memory, sealed files, and copies between buffers."""

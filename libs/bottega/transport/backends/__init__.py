"""What carries a link's bytes: shared memory within a host (memfd), TCP between hosts."""

"""ControlNets in the gateway: it assigns servers to attempts, and asks servers to prefetch."""

"""ControlNets in the gateway: it assigns servers to attempts, and lets servers prefetch."""

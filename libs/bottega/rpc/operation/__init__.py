"""How a service runs as a process: logs, metrics, and what systemd is told."""

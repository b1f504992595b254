"""How a service runs as a process: its start and end, logs, metrics, and what systemd is told."""

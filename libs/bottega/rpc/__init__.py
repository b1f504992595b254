"""What every service shares: its boot, and on the wire server, channels, statuses, logs, metrics, fleet membership."""

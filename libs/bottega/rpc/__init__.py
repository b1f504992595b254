"""What every service shares: its start and end, and on the wire server, channels, statuses and fleet membership."""

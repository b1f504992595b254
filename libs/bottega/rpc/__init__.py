"""The parts of every service: start and end, server, channels, statuses, fleet membership."""

"""Child processes: the framed pipe to them, pools of processes with limits, and the supervisor of an engine process."""

"""ControlNets of a suite: who hosts them, how servers are given more, and how they are profiled."""

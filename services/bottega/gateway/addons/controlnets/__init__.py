"""ControlNets: which servers an attempt is given, and what these servers load ahead."""

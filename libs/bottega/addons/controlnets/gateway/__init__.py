"""ControlNets: which servers an attempt gets, and what these servers prefetch."""

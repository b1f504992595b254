"""Things that a request may use beside its model, such as ControlNets and LoRAs: a package for each, one interface."""

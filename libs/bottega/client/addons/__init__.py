"""What the SDK offers for each add-on service: a package for ControlNets, one for LoRAs."""

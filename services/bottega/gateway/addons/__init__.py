"""What a request may have beside its model, such as ControlNets and LoRAs: a package for each kind, all behind one
interface.
"""

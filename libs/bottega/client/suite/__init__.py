"""The whole suite on one machine: what `bottega up` plans, starts, watches and stops."""

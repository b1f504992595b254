"""The suite of `bottega up`: plans, starts, supervises and stops all services on one machine."""

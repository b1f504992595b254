"""The checks of `bottega doctor`: of the machine, of the model, of the gateway. They change and start nothing."""

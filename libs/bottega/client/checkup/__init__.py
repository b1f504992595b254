"""What `bottega doctor` looks at: the machine, the model, the gateway. Changes nothing and starts nothing."""

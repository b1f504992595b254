"""The checks of `bottega doctor` and `bottega config check`. They change and start nothing."""

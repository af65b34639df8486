"""Which settings are worth a real probe, and which of those that were probed is the one to take. Pure."""

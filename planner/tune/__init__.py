"""The search of `slipstream tune`: which settings are worth a real probe, and which of the probed ones to take. Pure."""

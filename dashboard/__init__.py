"""The live page of runs: `slipstream dash`."""

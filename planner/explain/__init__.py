"""What to change in a run, why, and what the simulator says it gains."""

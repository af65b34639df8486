"""The command line, the launchers, the supervisor: how a run starts, stays alive and ends."""

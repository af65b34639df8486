"""The supervisor: starts the processes of a run, watches them, restarts them, stops them."""

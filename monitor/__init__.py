"""What is recorded and shown of a run: metrics, trackers, the live view, logging."""

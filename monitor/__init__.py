"""What is watched: metrics, trackers, the live view, the report, logging."""

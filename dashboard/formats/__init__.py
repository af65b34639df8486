"""A run in the formats of other programs: JSONL, Parquet and Inspect for trajectories, Perfetto and OpenTelemetry for times."""

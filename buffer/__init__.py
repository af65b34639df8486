"""Where trajectories wait: schema, wire format, admission, replay, ledger, durable store, service."""

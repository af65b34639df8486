"""The engine `fake`, for fault injection: slow, exact, with scripted faults, behind Slipstream's own server."""

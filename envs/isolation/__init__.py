"""Environments that run in processes of their own: with our interpreter, with another one, or on another host.

    worker ── source.py ──┬── pool.py ──ZeroMQ──> host.py, in N processes that process.py starts
                          └── remote.py ──ZeroMQ, CURVE──> serve.py on another host ── pool.py ──> host.py

All of them answer the requests of `messages.py`.
"""

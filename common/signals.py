"""Signals of a process into which a library has brought handlers of its own."""

from __future__ import annotations

import signal
import threading


def take_back_sigterm() -> None:
    """Have SIGTERM handled as Python, or its event loop, was told to, and by nothing else. A handler that a library's C++ code has
    installed since may write a stack trace and abort the process some seconds later by SIGALRM (Abseil's failure handler, which Ray
    installs); such an alarm is cleared. It does nothing outside the main thread, which alone handles signals."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as an event loop sets it
        signal.alarm(0)

"""The user who runs this process."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """The user's name; where the id has none, as in a container that was started with one, the id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        return str(os.getuid())

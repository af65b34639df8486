"""A run as a program: `async with Run(config) as run`, see `run.py`."""

from .run import Run

__all__ = ["Run"]

"""Types of values that come from other processes: bounded, so that what is decoded can be computed with, stored and shown."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

NAME_LENGTH, TEXT_LENGTH = 100, 4000  # characters

Name = Annotated[str, Meta(max_length=NAME_LENGTH)]  # of a role, a replica
Text = Annotated[str, Meta(max_length=TEXT_LENGTH)]  # for people; senders cut it
Version = Annotated[int, Meta(ge=0, lt=1 << 31)]  # a policy version: int32 in the learner's arrays
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]  # exact also as a float
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # finite, and a sum of many is too
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

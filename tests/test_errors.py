"""What is said of errors of other libraries."""

from __future__ import annotations

import pytest
from slipstream.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such model"), "no such model"),
        (OSError("\n  gone \n\nmost likely:\n  a page of advice"), "gone "),
        (KeyError(), "KeyError"),
        (RuntimeError(" \n "), "RuntimeError"),
    ],
)
def test_of_a_page_the_first_line_is_said_and_of_nothing_the_type(error: Exception, said: str) -> None:
    assert first_line(error) == said

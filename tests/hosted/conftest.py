"""What runs over several hosts share: the hosts, with their Ray nodes, which take long to start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from slipstream.chaos.hosts import Hosts
from slipstream.tests import forkgate


@pytest.fixture(scope="package")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Hosts of three CPUs each, which put the ranks of a learner on different ones: each is filled before the next. For runs one
    after the other, whose roles are forked, and of which none harms a host. These tests wait more than they compute: where
    types are checked, too, that begins when the hosts are there."""
    with contextlib.ExitStack() as stack:
        with forkgate.gated("vllm"):  # of which the roles are forked that these Ray nodes start
            hosts = stack.enter_context(Hosts([3, 3, 3, 3], tmp_path_factory.mktemp("hosts") / "hosts"))
        if any(item.path.stem == "test_types" for item in request.session.items):
            request.getfixturevalue("type_checker")
        yield hosts

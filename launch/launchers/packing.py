"""On which host each role should be, so that roles that talk to each other share hosts. Pure.

Each role has a placement group of its own, because Ray moves the lost bundles of one group only all together. Ray itself would
spread such groups; a target for each keeps the ranks of a learner side by side, as one group with the strategy PACK would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...common.replica_names import replica_of

Resources = Mapping[str, float]


def pack(
    bundles: Mapping[str, Resources],
    free: Mapping[str, Resources],
    pinned: Mapping[str, str],
    resource: str = "GPU",
    *,
    placed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A host for each role, by what the role needs (`bundles`) and what each host has (`free`). The host with the most of
    `resource`, then CPUs, is filled first, in the order of the roles. `pinned` roles get the host that they name if it has room.
    The processes of a replica that spans hosts get different ones as long as there are any; `placed` has the hosts of those that
    are placed already. A role without room has no entry."""
    left = {host: dict(has) for host, has in free.items()}
    hosts, placed, filled = dict[str, str](), placed or {}, ""
    for role in sorted(bundles, key=lambda role: role not in pinned):
        fits = [host for host, has in left.items() if all(has.get(k, 0.0) >= v for k, v in bundles[role].items())]
        if not fits:
            continue
        taken = _hosts_beside(role, {**placed, **hosts})
        fits = [host for host in fits if host not in taken] or fits
        if (host := pinned.get(role, "")) not in fits:
            if filled not in fits:
                filled = max(fits, key=lambda host: (left[host].get(resource, 0.0), left[host].get("CPU", 0.0)))
            host = filled
        hosts[role] = host
        for name, amount in bundles[role].items():
            left[host][name] -= amount
    return hosts


def assign(
    bundles: Mapping[str, Resources],
    free: Mapping[str, Resources],
    vacant: Sequence[tuple[str, float]],
    pinned: Mapping[str, str],
    resource: str = "GPU",
) -> tuple[dict[str, int], dict[str, str]]:
    """Of each role either the place that it takes over, an index in `vacant`, or the host of a new one, by `pack`. `vacant` has the
    host of each place that another role has left, and how much of `resource` is there: as much as the next role must need. Such a
    place on the host of another process of its replica is taken only where no other host has room."""
    given, hosts = dict[str, int](), dict[str, str]()

    def take_over(role: str, avoided: set[str]) -> None:
        for index, (host, has) in enumerate(vacant):
            if has == bundles[role].get(resource, 0.0) and host not in avoided and index not in given.values():
                given[role], hosts[role] = index, host
                return

    for role in bundles:
        take_over(role, _hosts_beside(role, hosts))
    new = {role: needs for role, needs in bundles.items() if role not in given}
    targets = pack(new, free, pinned, resource, placed=hosts)
    for role in new:
        if role not in targets or targets[role] in _hosts_beside(role, {**hosts, **targets}):
            take_over(role, set())
    return given, {role: host for role, host in targets.items() if role not in given}


def _hosts_beside(role: str, hosts: Mapping[str, str]) -> set[str]:
    """The hosts of the other processes of its replica, among the `hosts` of roles."""
    return {host for other, host in hosts.items() if replica_of(other) == replica_of(role) and other != role}

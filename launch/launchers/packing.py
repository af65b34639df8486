"""On which host each role should be, so that roles that talk to each other share hosts. Pure.

Each role has a placement group of its own, because Ray moves the lost bundles of one group only all together. Ray itself would
spread such groups; a target for each keeps the ranks of a learner side by side, as one group with the strategy PACK would.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...common.replica_names import replica_of

Resources = Mapping[str, float]


def pack(
    bundles: Mapping[str, Resources], free: Mapping[str, Resources], pinned: Mapping[str, str], resource: str = "GPU"
) -> dict[str, str]:
    """A host for each role, by what the role needs (`bundles`) and what each host has (`free`). The host with the most of
    `resource`, then CPUs, is filled first, in the order of the roles. `pinned` roles get the host that they name if it has room.
    The processes of a replica that spans hosts get different ones as long as there are any. A role without room has no entry."""
    left = {host: dict(has) for host, has in free.items()}
    hosts, filled = dict[str, str](), ""
    for role in sorted(bundles, key=lambda role: role not in pinned):
        fits = [host for host, has in left.items() if all(has.get(k, 0.0) >= v for k, v in bundles[role].items())]
        if not fits:
            continue
        taken = {host for other, host in hosts.items() if replica_of(other) == replica_of(role)}
        fits = [host for host in fits if host not in taken] or fits
        if (host := pinned.get(role, "")) not in fits:
            if filled not in fits:
                filled = max(fits, key=lambda host: (left[host].get(resource, 0.0), left[host].get("CPU", 0.0)))
            host = filled
        hosts[role] = host
        for name, amount in bundles[role].items():
            left[host][name] -= amount
    return hosts

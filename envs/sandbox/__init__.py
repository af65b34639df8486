"""Sandboxes: where everything that the policy writes runs."""

from .base import GIB, MIB, Ended, ExecResult, GatewayAddress, Limits, Mount, Sandbox, SandboxPool
from .e2b import E2BPool
from .kinds import require_sandbox
from .local import LocalPool, LocalSandbox, PythonSession, ShellSession, closing_pools, local_pool
from .swerex import SweRexPool

__all__ = [
    "GIB",
    "MIB",
    "E2BPool",
    "Ended",
    "ExecResult",
    "GatewayAddress",
    "Limits",
    "LocalPool",
    "LocalSandbox",
    "Mount",
    "PythonSession",
    "Sandbox",
    "SandboxPool",
    "ShellSession",
    "SweRexPool",
    "closing_pools",
    "local_pool",
    "require_sandbox",
]

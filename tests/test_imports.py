"""Who may know whom: the folders import only along the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "agents": {"envs", "buffer.trajectory"},
    "envs": set(),
    "rollout": {"agents", "envs", "buffer", "weightsync"},
    "buffer": {"monitor"},
    "learner": {"buffer", "weightsync"},
    "weightsync": {"monitor"},
    "monitor": set(),
    "configs": set(),
}
"""Beside itself, `configs`, `curve`, `durable`, `errors`, `heap`, `keepalive` and `parent`; `launch` may import everything, and
nobody imports it."""


def imports(path: Path, room: str) -> set[str]:
    """What a file imports of ours, as `room.module`."""
    found: set[str] = set()
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth and node.module:
                found.add(node.module)
            elif node.level == depth:
                found |= {alias.name for alias in node.names}
            elif node.level == 0 and (node.module or "").startswith("slipstream"):
                found.add((node.module or "").removeprefix("slipstream."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("slipstream.") for a in node.names if a.name.startswith("slipstream")}
    return {name for name in found if name.split(".")[0] != room}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_along_the_arrows(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    allowed = ALLOWED[room] | {"configs", "curve", "durable", "errors", "heap", "keepalive", "parent"}
    for path in files:
        for name in imports(path, room):
            parts = name.split(".")
            ways = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
            assert ways & allowed, f"{path.relative_to(ROOT)} imports {name}"


BACKENDS = {"fsdp2", "megatron"}


def test_what_learners_share_knows_no_backend_and_backends_not_each_other() -> None:
    """But for the critic, which FSDP2 holds whatever holds the policy."""
    learner = ROOT / "learner"
    files = [path for path in learner.rglob("*.py") if path.name != "critic.py"]
    assert {path.parent.name for path in files} >= BACKENDS
    for path in files:
        own = path.relative_to(learner).parts[0]
        known = {name.split(".")[0] for name in imports_within(path, learner)} & BACKENDS
        assert known <= {own}, f"{path.relative_to(ROOT)} imports {', '.join(known - {own})}"


def test_what_all_ranks_need_knows_nothing_of_credit_and_algorithms() -> None:
    learner = ROOT / "learner"
    known, waiting = set[str](), ["ranks"]
    while waiting:
        found = imports_within(learner / f"{waiting.pop()}.py", learner) - known
        known |= found
        waiting += found
    assert known == {"backend", "checkpoint", "lost", "model"}


def imports_within(path: Path, room: Path) -> set[str]:
    """What a file imports of its own room, as `module` or `package.module`."""
    inside = path.relative_to(room).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and 1 <= node.level <= len(inside) + 1:
            package = inside[: len(inside) + 1 - node.level]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join((*package, module)) for module in modules}
    return found


def test_the_check_sees_an_import(tmp_path: Path) -> None:
    assert "rollout.engine" not in imports(ROOT / "learner" / "loop.py", "learner")
    assert "buffer.client" in imports(ROOT / "learner" / "loop.py", "learner")
    learner = ROOT / "learner"
    assert "fsdp2.backend" in imports_within(learner / "critic.py", learner)
    assert {"ranks", "fsdp2.lora"} <= imports_within(learner / "fsdp2" / "model.py", learner)

"""The rules of the house: which folder imports which, no import circle, unique class names, short files and functions."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RUN = {"agents", "envs", "rollout", "buffer", "learner", "weightsync", "monitor", "rpc"}  # what a run is made of
ALLOWED = {
    "agents": {"envs", "buffer.trajectory"},
    "envs": {"rpc"},
    "rollout": {"agents", "envs", "buffer", "weightsync", "rpc"},
    "buffer": {"monitor", "rpc"},
    "learner": {"buffer", "weightsync", "rpc"},
    "weightsync": {"monitor", "rpc"},
    "planner": {"buffer", "rollout.concurrency", "rollout.routing", "weightsync.fleet", "monitor"},
    "dashboard": {"buffer", "monitor", "planner"},
    "monitor": set(),
    "configs": set(),
    "rpc": set(),
    "common": set(),
    "launch": {*RUN, "planner", "dashboard"},
    "chaos": {*RUN, "launch"},
    "benchmarks": {*RUN, "planner", "dashboard", "launch"},
}
"""What each folder may import besides itself, `configs`, `errors` and `common`. No product folder may import `chaos` or
`benchmarks`; the command line starts them by module name."""

HARNESSES = {"chaos", "benchmarks"}
PRODUCT = sorted(set(ALLOWED) - HARNESSES)
"""The product's folders; the harnesses test and measure it."""

LONGEST_FILE = 400
LONGEST_FUNCTION = 80


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name inside it, `buffer.replay`; the package itself is the empty name."""
    found = {"": ROOT / "__init__.py", "errors": ROOT / "errors.py"}
    for room in ALLOWED:
        for path in (ROOT / room).rglob("*.py"):
            if "shim" not in path.parts:
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, by their names inside the package; imports in functions count, too."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("slipstream.") for a in node.names if a.name.startswith("slipstream.")}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = ".".join((*package[: len(package) + 1 - node.level], *([node.module] if node.module else [])))
        elif (node.module or "").split(".")[0] == "slipstream":
            base = (node.module or "").removeprefix("slipstream").removeprefix(".")
        else:
            continue
        for alias in node.names:
            below = f"{base}.{alias.name}".removeprefix(".")
            found.add(below if below in modules() else base)
    return found


def test_every_folder_has_its_rule():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "examples"} == set(ALLOWED)
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "errors.py"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_along_the_arrows(room: str) -> None:
    allowed = ALLOWED[room] | {room, "configs", "errors", "common", ""}
    for path in (p for name, p in modules().items() if name.split(".")[0] == room):
        for name in imported(path):
            parts = name.split(".")
            prefixes = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
            assert prefixes & allowed, f"{path.relative_to(ROOT)} imports {name}"


def circles_in(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for after in graph.get(node, ()):
            if after not in order:
                visit(after)
            if after in stack:
                low[node] = min(low[node], low[after])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def test_no_import_circle_between_files():
    """Type-only imports and imports in functions count, too. A package's `__init__` only re-exports and is left out."""
    files = {name: path for name, path in modules().items() if path.name != "__init__.py"}
    graph = {name: imported(path) & set(files) - {name} for name, path in files.items()}
    assert circles_in(graph) == []


def test_no_import_circle_between_rooms():
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        room = name.split(".")[0]
        graph[room] |= {other.split(".")[0] for other in imported(path)} - {room, "", "errors"}
    # Agents name the trajectory's types, a single file that imports nothing; DESIGN allows that arrow alone.
    graph["agents"].discard("buffer")
    assert circles_in(graph) == []


def test_public_class_names_are_unique():
    """One name means one thing in the whole product."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if name.split(".")[0] in PRODUCT or name == "errors":
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_product_file_is_longer_than_400_lines_and_no_function_longer_than_80():
    long: list[str] = []
    for name, path in modules().items():
        if name.split(".")[0] in HARNESSES:
            continue
        lines = len(path.read_text().splitlines())
        if lines > LONGEST_FILE:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


BACKENDS = {"fsdp2", "megatron"}


def within_learner(path: Path) -> set[str]:
    """What a file of the learner imports of the learner, without the room's name."""
    return {name.removeprefix("learner.") for name in imported(path) if name.startswith("learner.")}


def test_what_learners_share_knows_no_backend_and_backends_not_each_other() -> None:
    """The critic is the exception: FSDP2 holds it whatever holds the policy."""
    learner = ROOT / "learner"
    files = [path for path in learner.rglob("*.py") if path.name != "critic.py"]
    assert {path.parent.name for path in files} >= BACKENDS
    for path in files:
        own = path.relative_to(learner).parts[0]
        known = {name.split(".")[0] for name in within_learner(path)} & BACKENDS
        assert known <= {own}, f"{path.relative_to(ROOT)} imports {', '.join(known - {own})}"


def test_what_all_ranks_need_knows_nothing_of_credit_and_algorithms() -> None:
    known, waiting = set[str](), ["distributed"]
    while waiting:
        found = within_learner(ROOT / "learner" / f"{waiting.pop()}.py") - known
        known |= found
        waiting += found
    assert not {name.split(".")[0] for name in known} & {
        "algorithms",
        "packing",
        "aux_models",
        "loop",
        "step",
        "batch",
    }


def test_the_checks_see_imports_and_circles() -> None:
    assert "rollout.engines.base" not in imported(ROOT / "learner" / "loop.py")
    assert "buffer.client" in imported(ROOT / "learner" / "loop.py")
    assert "fsdp2.backend" in within_learner(ROOT / "learner" / "aux_models" / "critic.py")
    assert {"distributed", "lora"} <= within_learner(ROOT / "learner" / "fsdp2" / "backend.py")
    assert circles_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles_in({"a": {"b", "c"}, "b": {"c"}}) == []


def at_import(tree: ast.AST) -> Iterator[str]:
    """The packages, of others, that an import of this file imports, too: what is in no function and not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from at_import(node)


def test_only_what_loads_a_chat_format_imports_renderers() -> None:
    """It imports a client of OpenAI's: most of a second of processor time, for every process that imports it."""
    formats = {"agents.chat_template", "agents.image_renderer"}
    product = {name: path for name, path in modules().items() if name.split(".")[0] in PRODUCT}
    assert {name for name, path in product.items() if "renderers" in at_import(tree_of(path))} == formats
    assert {name for name, path in product.items() if imported(path) & formats} == {"agents.registry"}
    top = {node.module for node in tree_of(product["agents.registry"]).body if isinstance(node, ast.ImportFrom)}
    assert "base" in top
    assert not {"chat_template", "image_renderer"} & top


LIGHT = """
import sys
from slipstream.launch.supervisor import entrypoints, factory, learner_rank
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.samplers import make_samplers
from slipstream import agents, dashboard
from slipstream.buffer import service
from slipstream.configs import load
from slipstream.dashboard import app
from slipstream.launch import preflight
from slipstream.rollout import player, worker
from slipstream.rollout.engines.vllm import client

make_samplers(RunInputs(load("quickstart")))
print(*sorted(set(sys.argv[1:]) & set(sys.modules)))
"""
"""What every role imports, the buffer, the dashboard, and what a worker imports beside a tokenizer and a chat format."""


def test_what_needs_no_model_imports_no_heavy_library() -> None:
    heavy = ["torch", "transformers", "renderers", "openai", "ray", "vllm", "pandas", "matplotlib", "datasets", "httpx"]
    command = [sys.executable, "-P", "-c", LIGHT, *heavy, "aiohttp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["aiohttp"]

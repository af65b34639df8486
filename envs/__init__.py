"""Environments: the contract, tools, and adapters to known libraries."""

from .base import JSON, Environment, Message, Observation, StepResult, Task, TaskSource, ToolCall, ToolSpec
from .registry import EnvPart, parts_of, require_penalties, task_source
from .simple import SimpleEnv, Split
from .tools import CALCULATOR, InvalidCall, Tool, call_tool, in_thread

__all__ = [
    "CALCULATOR",
    "JSON",
    "EnvPart",
    "Environment",
    "InvalidCall",
    "Message",
    "Observation",
    "SimpleEnv",
    "Split",
    "StepResult",
    "Task",
    "TaskSource",
    "Tool",
    "ToolCall",
    "ToolSpec",
    "call_tool",
    "in_thread",
    "parts_of",
    "require_penalties",
    "task_source",
]

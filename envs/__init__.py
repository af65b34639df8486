"""What a policy acts on: the environment contract, tools, and adapters to known libraries."""

from .base import JSON, Environment, Message, Observation, StepResult, Task, TaskSource, ToolCall, ToolSpec
from .calls import in_thread
from .registry import Part, parts_of, require_penalties, task_source
from .simple import SimpleEnv, Split
from .tools import CALCULATOR, InvalidCall, Tool, call_tool

__all__ = [
    "CALCULATOR",
    "JSON",
    "Environment",
    "InvalidCall",
    "Message",
    "Observation",
    "Part",
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

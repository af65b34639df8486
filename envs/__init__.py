"""Environments: the contract, tools, and adapters to known libraries."""

from .base import (
    JSON,
    Environment,
    Image,
    Message,
    Observation,
    StepResult,
    Task,
    TaskFile,
    TaskSource,
    ToolCall,
    ToolSpec,
)
from .interpreters import PythonTool, ShellTool
from .registry import EnvPart, parts_of, require_penalties, task_source
from .search import RetrieveServer, SearchIndex, search_tool
from .simple import SimpleEnv, Split
from .tool_env import ToolEnv
from .tools import CALCULATOR, InvalidCall, Tool, call_tool, in_thread

__all__ = [
    "CALCULATOR",
    "JSON",
    "EnvPart",
    "Environment",
    "Image",
    "InvalidCall",
    "Message",
    "Observation",
    "PythonTool",
    "RetrieveServer",
    "SearchIndex",
    "ShellTool",
    "SimpleEnv",
    "Split",
    "StepResult",
    "Task",
    "TaskFile",
    "TaskSource",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolSpec",
    "call_tool",
    "in_thread",
    "parts_of",
    "require_penalties",
    "search_tool",
    "task_source",
]

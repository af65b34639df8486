"""Agents: the contract, the token-in-token-out session, and the built-in agents."""

from .base import Agent, Completion, ContextExhausted, Generate, Policy
from .conversations import Conversation, read_conversations
from .demonstrations import RenderedDemonstration, render_demonstration
from .registry import load_agent, load_renderer
from .session import Session

__all__ = [
    "Agent",
    "Completion",
    "ContextExhausted",
    "Conversation",
    "Generate",
    "Policy",
    "RenderedDemonstration",
    "Session",
    "load_agent",
    "load_renderer",
    "read_conversations",
    "render_demonstration",
]

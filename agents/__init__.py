"""Agents: the contract, the token-in-token-out session, and the built-in agents."""

from .base import Agent as Agent
from .base import Completion as Completion
from .base import ContextExhausted as ContextExhausted
from .base import Generate as Generate
from .base import Policy as Policy
from .base import Reply as Reply
from .base import SampleRequest as SampleRequest
from .conversations import read_conversations as read_conversations
from .conversations import read_preferences as read_preferences
from .demonstrations import Demonstration as Demonstration
from .demonstrations import RenderedDemonstration as RenderedDemonstration
from .demonstrations import render_demonstration as render_demonstration
from .foreign import ForeignAgent as ForeignAgent
from .foreign import is_foreign as is_foreign
from .gateway import Endpoint as Endpoint
from .gateway import Gateway as Gateway
from .registry import load_agent as load_agent
from .registry import load_renderer as load_renderer
from .session import Session as Session

"""Tools that the policy calls in its own words: Python functions, and a sandboxed ``python``."""

from rlhf_core.agents.tools.agent import ToolAgent, ToolInstance
from rlhf_core.agents.tools.toolbox import Toolbox, make_toolbox

__all__ = ["ToolAgent", "ToolInstance", "Toolbox", "make_toolbox"]

"""Rules for ``agent.tools``."""

import pytest

from rlhf_core.config import load_config
from rlhf_core.errors import ConfigError

pytestmark = pytest.mark.agents

CONFIG = "calculator_tiny_cpu"


def test_tools_of_both_kinds():
    config = load_config(
        CONFIG, ["agent.tools=python,configs/agents/calculator.py:calculator", "agent.sandbox.disk_mib=2"]
    )

    assert config.execution_mode == "tools"
    assert config.agent.tools == ("python", "configs/agents/calculator.py:calculator")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["data.apply_chat_template=false"], "agent.tools needs data.apply_chat_template=true"),
        (["agent.tools=pyhton"], "agent.tools='pyhton': use 'python', or 'path.py:function'"),
        (["agent.tools=tools.py"], "agent.tools='tools.py': use 'python', or 'path.py:function'"),
        (["agent.tool_timeout=20"], "4 calls of agent.tool_timeout=20 s may take longer than agent.step_timeout=60 s"),
        (["agent.sandbox.packages=true"], "agent.sandbox is set, but agent.tools does not name 'python'"),
        (["agent.args={a: 1}"], "agent.args is set, but nothing reads it"),
        (["agent.tools="], "agent.max_turns is set, but nothing reads it"),
        (["agent.sandbox.memory_mib=1"], "agent.sandbox.memory_mib"),
    ],
)
def test_what_cannot_work_is_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(CONFIG, overrides)

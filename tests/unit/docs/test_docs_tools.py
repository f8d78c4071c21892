"""The tool that docs/agents.md shows is one."""

import pytest
from test_docs_examples import blocks, config_of, project  # noqa: F401  project is a fixture

from rlhf_core.agents.tools import make_toolbox

pytestmark = pytest.mark.agents


def test_the_tools_of_the_page_can_be_called(project):  # noqa: F811
    [fragment] = [block.text for block in blocks("yaml") if block.page == "agents.md" and "tools:" in block.text]

    schemas = make_toolbox(config_of(fragment).agent).schemas

    assert [schema["function"]["name"] for schema in schemas] == ["python", "price"]
    assert schemas[1]["function"]["parameters"]["properties"]["pieces"]["default"] == 1

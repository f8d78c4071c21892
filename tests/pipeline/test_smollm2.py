"""A real chat model: the engine's log-probs are those of the trainer, at the sampling temperature (It-must-show 5, CASE 64).

SmolLM2-135M-Instruct is made from a package, once per checkout: tools/get_smollm2.py.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.agents import Episode
from rlhf_core.agents.openai.answer import AgentAnswer
from rlhf_core.agents.openai.executor import OpenAIAgentExecutor, OpenAIAgentLimits
from rlhf_core.agents.openai.function import make_async_client
from rlhf_core.config import load_config
from rlhf_core.data import load_tokenizer, training_prompts
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.serving.options import ServerOptions
from rlhf_core.generation.serving.server import SessionServer
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import GenerateRequest, SamplingParams, action_mask

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24


@pytest.fixture(scope="module")
def smollm2() -> str:
    folder = ROOT / ".rlhf" / "models" / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, ROOT / "tools" / "get_smollm2.py", folder], check=True, timeout=600)
    return str(folder)


@pytest.fixture(scope="module")
def config(smollm2):
    path = f"actor.model_name_or_path={smollm2}"
    context = "vllm.max_model_len=512"  # an agent's calls grow
    return load_config(
        "configs/grpo_smollm2_arithmetic.yaml", [path, context, "ds.param_dtype=fp32", "run.cpu_threads=1"]
    )


@pytest.fixture(scope="module")
async def engine(config, smollm2):
    engine = VllmEngine(EngineSettings.from_config(config, smollm2, "cpu"))
    await engine.start(version=0)
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def scorer(config, smollm2):
    from rlhf_core.training.loading import load_causal_lm
    from rlhf_core.training.model import TokenScorer

    return TokenScorer(load_causal_lm(config, smollm2), config.ds.logprob_chunk).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_and_trainer_agree(config, smollm2, engine, scorer, temperature) -> None:
    prompts = [training_prompts(config, load_tokenizer(smollm2))[i] for i in range(6)]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5)
    requests = [GenerateRequest(p.row_id, p.token_ids, sampling, affinity="") for p in prompts]
    answers = {i: answer async for chunk in engine.generate_many(requests) for i, answer in chunk}

    differences = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt.token_ids, *answers[i].token_ids]])
        mask = torch.arange(ids.shape[1])[None] >= len(prompt.token_ids)
        with torch.no_grad():
            scored, *_ = scorer(ids, mask, torch.tensor([temperature]), want_entropy=False)
        differences.append(np.abs(scored[mask].numpy() - np.array(answers[i].logprobs)))

    worst = np.concatenate(differences)
    assert worst.size > 6
    assert worst.mean() < 1e-4
    assert worst.max() < 1e-3


async def test_prompts_are_those_of_the_chat_template(config, smollm2) -> None:
    """CASE 69: one beginning of sequence, ids as the template tokenises them."""
    tokenizer = load_tokenizer(smollm2)
    prompt = training_prompts(config, tokenizer)[0]
    question = prompt.text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]

    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=True, add_generation_prompt=True, return_dict=False
    )

    assert prompt.token_ids == rendered


class TalksTwice:
    """An agent with the real OpenAI client: two calls with a tool, the second one streamed; keeps the ids it was told."""

    def __init__(self):
        self.ids = []

    async def run(self, task, seconds):
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        options = {"model": "policy", "max_tokens": 16, "tools": [tool], "extra_body": {"return_token_ids": True}}
        async with make_async_client(task.session, seconds) as client:
            first = await client.chat.completions.create(messages=task.messages, **options)
            self.ids.append(first.choices[0].token_ids)
            said = first.choices[0].message.model_dump(exclude_none=True)
            messages = [*task.messages, said, {"role": "user", "content": "Are you sure?"}]
            streamed = []
            async for chunk in await client.chat.completions.create(messages=messages, stream=True, **options):
                streamed += (chunk.choices[0].model_extra or {}).get(
                    "token_ids"
                ) or []  # the first chunk has only the role
            self.ids.append(streamed)
        return AgentAnswer(1.0)


@pytest.mark.agents
async def test_an_agent_with_an_openai_client_is_trained_on_what_was_sampled(config, smollm2, engine, scorer) -> None:
    """It-must-show 3 of the agents: tools, a stream, one row; ids are vLLM's, log-probs the trainer's."""
    tokenizer = load_tokenizer(smollm2)
    prompt = training_prompts(config, tokenizer)[0]
    server, agent = SessionServer(engine, ServerOptions(model=smollm2)), TalksTwice()
    sampling = SamplingParams(max_tokens=32, temperature=1.0, seed=5)
    episode = Episode(
        "run", 0, prompt, "g0", 0, sampling, max_len=512, generate=engine, tokenizer=tokenizer, server=server
    )

    rows = await OpenAIAgentExecutor(agent, OpenAIAgentLimits(120, 8, 1)).execute(episode)
    await server.stop()

    spoken = [row.token_ids[start:end].tolist() for row in rows for start, end in row.action_ranges]
    assert spoken == agent.ids
    for row in rows:
        ids = torch.tensor(row.token_ids[None].astype(np.int64))
        mask = action_mask(row.action_ranges, len(row.token_ids))
        with torch.no_grad():
            scored, *_ = scorer(ids, torch.tensor(mask[None]), torch.tensor([1.0]), want_entropy=False)
        assert np.abs(scored[0].numpy() - row.rollout_logprobs)[mask].max() < 1e-3
    assert len(rows) == 1

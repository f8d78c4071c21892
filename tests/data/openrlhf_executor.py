"""An agent file in OpenRLHF's style whose executor runs a loop of its own: only the import line is this project's."""

import copy

from rlhf_core.agents import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        super().__init__(agent_instance_cls=None)

    async def execute(
        self, prompt, label, sampling_params, max_length: int, hf_tokenizer, llm_engine, images=None
    ) -> dict:
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        action_ranges, log_probs, truncated = [], [0.0] * len(tokens), False
        for turn in range(2):
            params = copy.deepcopy(sampling_params)
            params.max_tokens = min(params.max_tokens, max_length - len(tokens))
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            action_ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            tokens = tokens + output.token_ids
            log_probs += [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            truncated = output.finish_reason == "length"
            if turn == 0:
                feedback = hf_tokenizer.encode(f"\n{len(output.text)}?", add_special_tokens=False)
                tokens, log_probs = tokens + feedback, log_probs + [0.0] * len(feedback)
        assert await llm_engine.get_weight_version() is not None
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": action_ranges,
            "rollout_log_probs": log_probs,
            "reward": float(len(tokens)),
            "scores": 0.5,
            "extra_logs": {"turns_seen": 2},
            "truncated": truncated,
        }

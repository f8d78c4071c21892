"""What the training tests share: rows, a configuration, a naive gradient to compare with, and real ranks to run on."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from dataclasses import replace

import numpy as np
import torch

from rlhf_core.config import parse_config
from rlhf_core.records import ActionRange, Experience

ANSWER_S = 240

# A small model of four heads, and rows that it is asked.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
IDS_BT = torch.arange(27).reshape(3, 9) % 7
ACTIONS_BT = torch.tensor([[0] * 8 + [1], [0, 1, 1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)


class RankPool:
    """Processes that stay up and run one function after another on all ranks: imports are paid once.

    After a failure they are made anew: the next test must not fail of the one before.
    """

    def __init__(self, world_size, device="cpu"):
        self.world_size, self.device = world_size, device
        self.pipes, self.processes = [], []

    def run(self, function, *args, **kwargs):
        """Call ``function(rank, ...)`` on every rank: the results, by rank."""
        if not self.processes:
            self._start()
        try:
            return self._ask((function, args, kwargs))
        except BaseException:
            self.close()
            raise

    def close(self):
        for process in self.processes:
            process.kill()
            process.join(10)
        self.pipes, self.processes = [], []

    def _start(self):
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            arguments = (there, rank, self.world_size, port, self.device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def _ask(self, call):
        for pipe in self.pipes:
            pipe.send(call)
        results = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(ANSWER_S), f"rank {rank} gave no answer in {ANSWER_S} s"
            ok, result = pipe.recv()
            assert ok, f"rank {rank}:\n{result}"
            results.append(result)
        return results


def _serve(pipe, rank, world_size, port, device):
    from rlhf_core.training import ds_config
    from rlhf_core.training.ranks import RankInfo, init_distributed

    # Buffers of this size are never given back under ZeRO-3: 200 MB an engine, and a pool makes a hundred. It still holds the
    # whole of a tiny model.
    ds_config.BUCKET_ELEMENTS = 1_000_000
    info = RankInfo(rank, world_size, rank, "127.0.0.1", port, device, num_threads=1)
    init_distributed(info, timeout=60, deterministic=True)
    while True:
        function, args, kwargs = pipe.recv()
        try:
            pipe.send((True, function(info, *args, **kwargs)))
        except Exception:  # noqa: BLE001  whatever it is, the test shows it
            pipe.send((False, traceback.format_exc()))
            return


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def config(*overrides):
    base = {
        "actor": {"model_name_or_path": "tiny", "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "max_norm": 1e9},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"functions": [{"use": "digits"}]},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 4},
        "ds": {"zero_stage": 2, "param_dtype": "fp32"},
    }
    return parse_config(base, ["actor.adam.lr=1e-3", *overrides])


def experience(index, num_actions, prompt=3, temperature=1.0, seed=0):
    """A row whose old and rollout log-probs are near those of a random model."""
    length = prompt + num_actions
    rng = np.random.default_rng([seed, index])

    def on_actions(values):
        values_T = np.zeros(length, dtype=np.float32)
        values_T[prompt:] = values
        return values_T

    old = -5.8 + 0.1 * rng.standard_normal(num_actions)
    return Experience(
        group_id=f"g{index // 4}",
        sample_index=index % 4,
        segment_index=0,
        token_ids=rng.integers(0, 256, length).astype(np.int32),
        action_ranges=(ActionRange(prompt, length),) if num_actions else (),
        rollout_logprobs=on_actions(old + 0.05 * rng.standard_normal(num_actions)),
        old_logprobs=on_actions(old),
        ref_logprobs=None,
        values=None,
        advantages=on_actions(rng.standard_normal()),
        returns=on_actions(0.0),
        reward=0.0,
        shaped_reward=0.0,
        temperature=temperature,
        constrained=False,
    )


def experiences(lengths=range(1, 9), **changes):
    """Rows of 1, 2 ... 8 action tokens."""
    return [experience(i, n, **changes) for i, n in enumerate(lengths)]


def with_own_logprobs(rows, logprobs):
    """The rows with log-probs of the policy itself as old and rollout log-probs."""
    return [replace(row, old_logprobs=lp, rollout_logprobs=lp) for row, lp in zip(rows, logprobs, strict=True)]


def rewarded(rows):
    """The rows with advantage 1 on every action."""
    return [replace(row, advantages=np.abs(np.sign(row.advantages))) for row in rows]


def naive_logprobs(model, row):
    """Hugging Face's whole forward pass on one unpadded row: log-probs of the action tokens, with a graph."""
    ids_1T = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    logp_TV = (model(input_ids=ids_1T).logits[0].float() / row.temperature).log_softmax(-1)
    [(start, end)] = row.action_ranges
    positions = torch.arange(start, end)
    return logp_TV[positions - 1, ids_1T[0, positions]]


def naive_gradient(model_path, rows):
    """By hand: PPO's token-mean loss over all rows at once, clip range .2, no correction. Name to gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    losses = []
    for row in rows:
        [(start, end)] = row.action_ranges
        ratio = (naive_logprobs(model, row) - torch.from_numpy(row.old_logprobs[start:end])).exp()
        advantage = torch.from_numpy(row.advantages[start:end])
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    torch.cat(losses).mean().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def largest_difference(gradient, expected):
    assert gradient.keys() == expected.keys()
    assert max(np.abs(g).max() for g in expected.values()) > 1e-3  # there is something to compare
    return max(np.abs(gradient[name] - expected[name]).max() for name in expected)


# --- what the ranks run ----------------------------------------------------------------------------------------------


def make_trainer(rank, model, overrides=(), total_steps=100):
    from rlhf_core.training.policy import PolicyTrainer

    ranks = f"actor.num_gpus_per_node={rank.world_size}"
    return PolicyTrainer(config(ranks, *overrides), model, rank, total_steps)


def gradient(rank, model, rows, overrides=()):
    """The gradient of one optimizer step, before the optimizer sees it. Name to array, the same on every rank."""
    from deepspeed.utils import safe_get_full_grad

    trainer = make_trainer(rank, model, overrides)
    [step] = trainer.plan(rows, iteration=0)
    trainer.engine.train()
    trainer.accumulate(step, rows, kl_coef=0.0)
    return {name: safe_get_full_grad(p).detach().cpu().numpy() for name, p in trainer.hf_model.named_parameters()}


def logprobs(rank, model, rows, overrides=()):
    return make_trainer(rank, model, overrides).logprobs(rows)


def reference_logprobs(rank, model, rows, overrides=()):
    from rlhf_core.training.reference import ReferenceModel

    return ReferenceModel(config(*overrides), model, rank).logprobs(rows)


def updates(rank, model, batches, overrides=()):
    """One update a batch: the reports, and the digest before the first and after each one."""
    trainer = make_trainer(rank, model, overrides)
    digests, reports = [trainer.weight_digest()], []
    for iteration, rows in enumerate(batches):
        reports.append(trainer.update(rows, iteration))
        digests.append(trainer.weight_digest())
    return reports, digests


def continued(rank, model, batches, overrides, folder):
    """Half of the updates, then the others by a new trainer that loads what the first one saved."""
    half = len(batches) // 2
    first = make_trainer(rank, model, overrides)
    for iteration, rows in enumerate(batches[:half]):
        first.update(rows, iteration)
    first.save(folder)
    second = make_trainer(rank, model, overrides)
    second.load(folder)
    reports = [second.update(rows, half + i) for i, rows in enumerate(batches[half:])]
    return reports, second.weight_digest(), (second.version, second.optimizer_steps)


def taking_turns(rank, model, batches, overrides):
    """Updates with a turn of the engines before each: digests as of ``updates``, log-probs, and bytes that were away."""
    trainer = make_trainer(rank, model, overrides)
    digests, away = [trainer.weight_digest()], []
    for iteration, rows in enumerate(batches):
        before = {name: weight.clone() for name, weight in trainer.named_weights()}
        trainer.offload()
        away.append(trainer._offload.bytes_away)
        trainer.reload(parameters_only=True)
        trainer.check_loaded(parameters_only=True)
        assert all(weight.equal(before[name]) for name, weight in trainer.named_weights())  # what a weight sync sends
        trainer.offload()
        trainer.reload()
        logprobs = trainer.logprobs(rows)
        trainer.update(rows, iteration)
        trainer.offload(keep_parameters=True)
        trainer.reload()
        digests.append(trainer.weight_digest())
    return digests, logprobs, away


def reference_between_passes(rank, model, rows, overrides):
    """Log-probs of a reference model with ``ref.offload``, twice, and bytes that were away before, between and after."""
    from rlhf_core.training.reference import ReferenceModel

    reference = ReferenceModel(config(*overrides, "algo.kl.init_coef=0.1", "ref.offload=true"), model, rank)
    away, found = [reference._offload.bytes_away], []
    for _ in range(2):
        found.append(reference.logprobs(rows))
        away.append(reference._offload.bytes_away)
    return found, away


def broken_off_update(rank, model, rows):
    """An update of two optimizer steps whose second raises: (version before, version after)."""
    trainer = make_trainer(rank, model, ["train.batch_size=4"])
    before, take, taken = trainer.version, trainer._take_step, []

    def second_raises(*args):
        taken.append(1)
        if len(taken) == 2:
            raise RuntimeError("out of memory")
        take(*args)

    trainer._take_step = second_raises
    try:
        trainer.update(rows, iteration=0)
    except RuntimeError:
        return before, trainer.version
    raise AssertionError("the update went through")

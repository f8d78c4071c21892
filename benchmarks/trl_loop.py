"""TRL's GRPOTrainer in a process of its own, one iteration whenever it is asked: the other side of ``benchmarks.peers``.

::

    python -m benchmarks.trl_loop JOB.json
    stdin    go ─▶ one iteration         end of input ─▶ the end
    stdout   {"ready": …} once, then a line of seconds an iteration

An iteration is TRL's own: one ``training_step`` a micro-batch, the first of which generates, then the optimizer's step.
Its cheapest choices: weights in the type of the run, without autocast or fp32 copies; no gradient checkpointing; no KL,
so no reference model; one step a batch, for which it computes no log-probs besides those of the loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What TRL is to do, in plain values: this side of it knows no configuration of ours."""

    model: str  # folder
    dtype: str  # torch's name
    attention: str
    reward: str  # name of a function of rlhf_core.rewards.builtins
    rows: list[dict[str, Any]]  # prompt (text as the model reads it), label, tokens: of every iteration, in order
    prompts: int  # of an iteration
    samples: int  # of a prompt
    tokens: int  # of an answer, no fewer and no more
    micro_batch: int  # samples of a forward and backward pass
    temperature: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    seed: int
    threads: int
    folder: str

    @property
    def iterations(self) -> int:
        return len(self.rows) // self.prompts


@dataclass
class Seconds:
    """Of one iteration, by the clock or of the processor."""

    generate: float = 0.0  # tokens in, text out
    total: float = 0.0


@dataclass
class Times:
    """One iteration."""

    wall: Seconds = field(default_factory=Seconds)
    cpu: Seconds = field(default_factory=Seconds)
    reward: float = 0.0  # mean
    tokens: int = 0  # sampled


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # TRL and transformers print
    make_trainer(job, answers).train()


def make_trainer(job: Job, answers: Any) -> Any:
    """Times itself; waits for leave before each iteration."""
    import torch

    torch.set_num_threads(job.threads)
    import trl  # type: ignore[import-not-found]
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from rlhf_core.rewards.builtins import BUILTINS

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    check_tokens(job, tokenizer)
    times = Times()

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[str]) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            generated = super()._generate(prompts)
            times.wall.generate, times.cpu.generate = time.perf_counter() - wall, time.process_time() - cpu
            times.tokens = sum(map(len, generated[1]))
            return generated

    class Leave(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)  # nobody asks any more
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.wall.total, times.cpu.total = time.perf_counter() - self.wall, time.process_time() - self.cpu
            print(json.dumps(asdict(times)), file=answers)

    def reward(completions: list[str], label: list[Any], **_: Any) -> list[float]:
        scores = BUILTINS[job.reward](completions, completions, label, answers=completions)
        times.reward = sum(scores) / len(scores)
        return scores

    rows = [{"prompt": row["prompt"], "label": row["label"]} for row in job.rows]
    batch = job.prompts * job.samples
    trainer = Trainer(
        model=job.model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Leave()],
        args=trl.GRPOConfig(
            output_dir=job.folder,
            model_init_kwargs={"dtype": job.dtype, "attn_implementation": job.attention},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=batch // job.micro_batch,
            num_generations=job.samples,
            max_completion_length=job.tokens,
            generation_kwargs={"min_new_tokens": job.tokens},
            temperature=job.temperature,
            shuffle_dataset=False,
            max_steps=job.iterations,
            learning_rate=job.lr,
            adam_beta1=job.betas[0],
            adam_beta2=job.betas[1],
            adam_epsilon=job.eps,
            weight_decay=job.weight_decay,
            max_grad_norm=job.max_norm,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            beta=0.0,
            seed=job.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        ),
    )
    print(json.dumps({"ready": trl.__version__}), file=answers)
    return trainer


def check_tokens(job: Job, tokenizer: Any) -> None:
    """Both sides must read the same prompts.

    Raises:
        SystemExit: TRL's tokens of one differ.
    """
    for row in job.rows:
        if (found := tokenizer(text=row["prompt"])["input_ids"]) != row["tokens"]:
            raise SystemExit(f"the prompt {row['prompt']!r} is {row['tokens']} here and {found} in TRL: not comparable")


if __name__ == "__main__":
    main()

"""The cells of the matrix: every algorithm in every execution mode in every pipeline, each a short run of a tiny model.

::

    (gae, reinforce, …) × (single_turn, multi_turn, openai, vlm) × (sync, async, partial)  =  72 cells

Each algorithm brings one more thing that must work everywhere (``TWISTS``), so that the cells of a row differ in more than
the formula of their advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from rlhf_core.config.rules import ESTIMATORS

BATCH, SAMPLES = 2, 2
ITERATIONS = 3

SMALL = (
    f"rollout.batch_size={BATCH}",
    f"rollout.n_samples_per_prompt={SAMPLES}",
    "rollout.publish_groups=1",
    "train.num_episodes=1",
    "train.max_iterations=null",  # the data end the run
    "eval.dataset=[]",
    "ckpt.save_steps=-1",
    "ckpt.save_hf=false",
    "reward.num_workers=1",
    # The same engine for all modes: see matrix_processes.py.
    "vllm.max_model_len=768",
    "vllm.max_num_seqs=32",
    "vllm.cpu_kv_cache_gib=0.25",
    "train.seed=1",
    "run.cpu_threads=1",
    "run.stage_timeout=120",
    "run.start_timeout=240",
)

# mode -> the shipped example, its prompts without their number, and what makes it small
MODES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "single_turn": (
        "grpo_tiny_cpu.yaml",
        "configs/tasks/digits.py:prompts?",
        ("rollout.max_new_tokens=24", "data.max_len=768"),
    ),
    "multi_turn": ("guess_number_tiny_cpu.yaml", "configs/agents/guess_number.py:prompts?", ()),
    "openai": (
        "openai_agent_tiny_cpu.yaml",
        "configs/agents/openai_two_tools.py:purchases?",
        ("rollout.max_new_tokens=32",),
    ),
    "vlm": (
        "vlm_shapes_tiny_cpu.yaml",
        "configs/tasks/shapes.py:prompts?size=28&",
        ("rollout.max_new_tokens=8", "rollout.ignore_eos=true", "data.max_len=768"),
    ),
}

PIPELINES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "async": ("train.async_enable=true",),
    "partial": ("train.async_enable=true", "train.partial_rollout_enable=true"),
}

# With partial rollout, where an answer is one request: so long that weight syncs meet some of them in flight.
LONG_ANSWERS = ("rollout.max_new_tokens=600",)


@dataclass(frozen=True)
class Twist:
    """What an algorithm's cells do besides."""

    overrides: tuple[str, ...]
    mode: str | None = None  # only in this one
    pipeline: str | None = None  # only in this one
    prompts: int = BATCH * ITERATIONS


TWISTS: dict[str, Twist] = {
    # gae has its critic
    "reinforce": Twist(("train.batch_size=2", "train.max_epochs=2")),  # four optimizer steps an iteration
    "reinforce_baseline": Twist(  # a reference model
        ("algo.kl.init_coef=0.01", "algo.kl.use_loss=true", "algo.kl.estimator=k2")
    ),
    "rloo": Twist(  # sampled ahead: batches are filled in rounds, and with partial rollout from what was left unfinished
        (f"rollout.vllm_generate_batch_size={2 * BATCH}", "rollout.max_age=1", "rollout.ignore_eos=false"), prompts=8
    ),
    "group_norm": Twist(  # DAPO: about half of the groups are filtered, and replaced
        (
            "algo.dynamic_filtering_enable=true",
            "algo.dynamic_filtering_range=[0.024, 1.0]",
            f"rollout.vllm_generate_batch_size={2 * BATCH}",
            "rollout.max_age=1",
        ),
        mode="single_turn",
        prompts=12,
    ),
    "dr_grpo": Twist(
        ("train.async_queue_size=2", "train.partial_rollout_kv=keep", "train.partial_rollout_mask_old=true"),
        pipeline="partial",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    estimator: str
    mode: str
    pipeline: str

    @property
    def name(self) -> str:
        """Also names its run."""
        return f"{self.estimator}-{self.mode}-{self.pipeline}"

    @property
    def config(self) -> str:
        """The example it is made from."""
        return MODES[self.mode][0]

    @property
    def overrides(self) -> list[str]:
        """What makes it this cell."""
        _, dataset, of_mode = MODES[self.mode]
        twist = self._twist
        return [
            *SMALL,
            f"data.prompt_dataset={dataset}count={twist.prompts}",
            f"algo.advantage.estimator={self.estimator}",
            *of_mode,
            *(LONG_ANSWERS if self.pipeline == "partial" and self.mode in ("single_turn", "vlm") else ()),
            *PIPELINES[self.pipeline],
            *twist.overrides,
        ]

    @property
    def _twist(self) -> Twist:
        twist = TWISTS.get(self.estimator, Twist(()))
        here = twist.mode in (None, self.mode) and twist.pipeline in (None, self.pipeline)
        return twist if here else Twist(())


CELLS = tuple(Cell(*axes) for axes in product(ESTIMATORS, MODES, PIPELINES))

# What `make test` runs: each algorithm and each mode, each pipeline twice, no two axes in the same combination again.
SAMPLE = (
    Cell("gae", "vlm", "partial"),
    Cell("reinforce", "openai", "sync"),
    Cell("reinforce_baseline", "multi_turn", "async"),
    Cell("rloo", "single_turn", "partial"),
    Cell("group_norm", "single_turn", "async"),
    Cell("dr_grpo", "multi_turn", "sync"),
)

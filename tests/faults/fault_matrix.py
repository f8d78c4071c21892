"""The kill matrix: who is killed, in which stage, how it is brought back, and what must hold afterwards.

::

    one run a victim    iteration   0     1        2        3          4        5            6          7           8
    killed in                       -     rollout  reward   advantage  update   weight sync  evaluate   checkpoint  -
    checkpoints                                             v4                                          v8          v9

So a policy is re-made from the model alone, from recorded updates, and from a checkpoint and updates.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fault_stack import FaultStack, kill, wait_until

from rlhf_core.errors import StorageError
from rlhf_core.records import Ledger, Stage
from rlhf_core.storage import CheckpointStore

STAGES = ("rollout", "reward", "advantage", "update", "weight sync", "evaluate", "checkpoint")
ITERATIONS = len(STAGES) + 2
SAVE_STEPS = 4
PROMPTS, SAMPLES = 4, 4

OVERRIDES = [
    f"train.max_iterations={ITERATIONS}",
    f"rollout.batch_size={PROMPTS}",
    f"rollout.n_samples_per_prompt={SAMPLES}",
    "rollout.max_new_tokens=16",
    "rollout.publish_groups=1",  # so that a rollout is killed when some groups are published and some are not
    f"vllm.max_num_seqs={SAMPLES}",
    "train.batch_size=8",  # two optimizer steps: so the ranks are asked for log-probs before
    "train.micro_batch_size=8",
    "run.lease_seconds=300",  # of the actors: they are found again, however slow the machine is
    "reward.functions=[{use: tests/faults/held_reward.py}]",
    f"eval.dataset=configs/tasks/digits.py:prompts?count={PROMPTS}&seed=1000",
    f"eval.n_samples_per_prompt={SAMPLES}",
    "eval.steps=1",
    f"ckpt.save_steps={SAVE_STEPS}",
    "run.cpu_threads=1",
]

RANKS = {"training rank": 2}  # of the policy: one dies, the other waits for it; elsewhere one

AWAY_SECONDS = 3.0  # a server that was killed is missed for so long, at least
REACH_SECONDS = 1200.0  # beside other work on the machine a cluster takes minutes to start
DONE_SECONDS = 1200.0
LOOK_SECONDS = 2.0  # between two looks at the state of the flow run
UNATTENDED_SECONDS = 600.0  # a run that has ended for so long will not go on by itself

CORE = (
    "rollout",
    "advantage",
    "evaluate",
)  # where of the engine only vLLM's own process is killed, not the actor above it

# victim -> what one does about it, as docs/operations.md says
BY_ITSELF, UP, UP_AND_RETRY, SERVER = "nothing", "rlhf up", "rlhf up, retry", "start it again"
VICTIMS = {
    "flow process": BY_ITSELF,
    "Prefect worker": UP,
    "Prefect server": UP,
    "rollout engine": BY_ITSELF,
    "training rank": BY_ITSELF,
    "reward worker": BY_ITSELF,
    "Ray head": UP_AND_RETRY,
    "MLflow": UP,
    "S3 server": SERVER,
}


class MatrixRun:
    """A run of the stack, and the points at which it is held."""

    def __init__(
        self, stack: FaultStack, run_id: str, ranks: int, victim: str = "", stages: Sequence[str] = ()
    ) -> None:
        """``stages``: in which ``victim`` is to be killed."""
        self.stack, self.run_id, self.victim = stack, run_id, victim
        self.store = stack.store(run_id)
        self._retries = 0
        self._ended_at: float | None = None
        self._looked_at = 0.0
        for left in stack.holds.iterdir():
            left.unlink()
        for stage in stages:
            (stack.holds / point(stage, victim)).touch()
        overrides = [*OVERRIDES, f"actor.num_gpus_per_node={ranks}", f"storage.root={stack.root}"]
        parameters = {"config": "grpo_tiny_cpu.yaml", "overrides": overrides, "run_id": run_id}
        self.flow_run_id = stack.submit(parameters)

    def reach(self, stage: str) -> int:
        """Wait until the run is held in a stage. Returns the process that waits there."""
        reached = self._reached(stage)

        def found() -> bool:
            self._must_go_on()
            return reached.exists()

        wait_until(found, REACH_SECONDS, f"{self.run_id} comes to {stage}")
        return int(reached.read_text())

    def release(self, stage: str) -> None:
        """Let it go on."""
        self._reached(stage).unlink()

    def wait_for(self, iteration: int) -> None:
        """Until all that belongs to the iteration is recorded; fails once the run has ended without it."""
        self._wait(lambda: self._is_done(iteration), f"iteration {iteration} is done")

    def wait_for_end(self) -> None:
        """Until the flow run is completed."""
        self._wait(lambda: (self.stack.state(self.flow_run_id) or {}).get("type") == "COMPLETED", "the run completes")

    def digest(self, iteration: int) -> str:
        """Of the weights that the iteration made."""
        return str(self._stage(iteration, Stage.UPDATE)["digest"])

    def ledgers(self, iteration: int) -> tuple[Ledger, Ledger]:
        """Of the iteration, and of the run so far."""
        body = self._stage(iteration, Stage.EXPERIENCE)
        return Ledger(**body["ledger"]), Ledger(**body["ledger_total"])

    def published(self, iteration: int) -> set[str]:
        """Digests of the trajectory shards that are durable."""
        return {part.sha256 for part in self.store.published_parts(iteration, Stage.ROLLOUT)}

    def trained_on(self, iteration: int) -> set[str]:
        """Digests of the trajectory shards that the iteration's manifest names."""
        found = self.store.stage(iteration, Stage.ROLLOUT)
        assert found is not None
        return {part.sha256 for part in found[0].parts}

    def began(self, stage: str) -> float:
        """When a stage began in its iteration, unix seconds: by its record, or by that of the stage before."""
        iteration = iteration_of(stage)
        if stage == "weight sync":
            return ended(self._stage(iteration, Stage.UPDATE))
        if stage == "evaluate":
            return float((self.store.read_evaluation(iteration + 1) or {})["started_at"])
        if stage == "checkpoint":
            return float((CheckpointStore(self.store).get(iteration + 1) or {})["started_at"])
        of = {"advantage": Stage.EXPERIENCE}.get(stage) or Stage(stage)
        return float(self._stage(iteration, of)["started_at"])

    def went_on(self, iteration: int) -> float:
        """When the iteration after this one began, unix seconds; waits until that is recorded."""
        following = iteration + 1
        self._wait(lambda: self.store.stage(following, Stage.ROLLOUT) is not None, f"iteration {following} begins")
        return float(self._stage(iteration + 1, Stage.ROLLOUT)["started_at"])

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        for left in self.stack.holds.iterdir():
            left.unlink()
        with contextlib.suppress(AssertionError):
            self.stack.prefect("--no-prompt", "flow-run", "cancel", self.flow_run_id)

    def _stage(self, iteration: int, stage: Stage) -> dict[str, object]:
        found = self.store.stage(iteration, stage)
        assert found is not None, f"{stage} of iteration {iteration} is not recorded"
        return found[0].body

    def _is_done(self, iteration: int) -> bool:
        """False too while the store is away."""
        version = iteration + 1
        saved = version % SAVE_STEPS == 0 or version == ITERATIONS
        try:
            return (
                self.store.stage(iteration, Stage.UPDATE) is not None
                and self.store.read_evaluation(version) is not None
                and (not saved or CheckpointStore(self.store).get(version) is not None)
            )
        except StorageError:
            return False

    def _reached(self, stage: str):
        name = {"rollout": "generating", "reward": "scoring"}.get(stage) or point(stage, self.victim)
        if stage == "evaluate":
            name = "scoring" if name.startswith("judge") else "generating"
        return self.stack.holds / f"{name}.reached"

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it is met, looking after the run meanwhile."""

        def met() -> bool:
            if condition():
                return True
            self._must_go_on()
            return False

        wait_until(met, DONE_SECONDS, f"{self.run_id}: {what}", pause=0.5)

    def _must_go_on(self) -> None:
        """Retry a run that has ended, where that is what one does; else fail, once it has ended for good."""
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        state = self.stack.state(self.flow_run_id)
        if state is None or state["type"] not in ("FAILED", "CRASHED", "CANCELLED"):
            self._ended_at = None
            return
        self._ended_at = self._ended_at or time.monotonic()
        if VICTIMS.get(self.victim) == UP_AND_RETRY:
            self._retries += 1
            assert self._retries <= len(STAGES), f"{self.run_id}: retried again and again"
            self.stack.prefect("flow-run", "retry", self.flow_run_id)
            return
        gone = time.monotonic() - self._ended_at
        goes_on_by_itself = state["type"] == "CRASHED" and gone < UNATTENDED_SECONDS
        assert goes_on_by_itself, (
            f"{self.run_id} ended as {state['name']}: {state['message']}\n{self.stack.errors(self.flow_run_id)}"
        )


def iteration_of(stage: str) -> int:
    """In which it is killed."""
    return STAGES.index(stage) + 1


def point(stage: str, victim: str) -> str:
    """Name of the point at which the stage is held: see ``rlhf_holds``."""
    iteration = iteration_of(stage)
    version = iteration + 1
    return {
        "rollout": f"rollout-{iteration}",
        "reward": f"reward-{iteration}",
        "advantage": f"advantage-{iteration}",
        "update": f"update-{iteration}" if victim == "training rank" else f"updated-{iteration}",
        "weight sync": f"sync-{version}",
        "evaluate": f"judge-{version}" if victim == "reward worker" else f"evaluate-{version}",
        "checkpoint": f"checkpoint-{version}",
    }[stage]


def strike(run: MatrixRun, stage: str, holder: int) -> None:
    """SIGKILL of the run's victim. ``holder``: the process that is held in the stage."""
    stack = run.stack
    found = {
        "flow process": lambda: stack.flow(run.run_id),
        "Prefect worker": lambda: stack.server("worker")[:1],  # not the runs that it started
        "Prefect server": lambda: stack.server("prefect"),
        "rollout engine": lambda: stack.processes("VLLM::EngineCore" if stage in CORE else "ray::EngineWorker"),
        "training rank": lambda: one_of(stack.processes("ray::PolicyWorker"), holder),
        "reward worker": lambda: one_of(stack.processes("rlhf_core.rewards.worker"), holder),
        "Ray head": lambda: [each for each in stack.server("ray") if not each.name().startswith("ray::")],
        "MLflow": lambda: stack.server("mlflow"),
    }
    if run.victim == "S3 server":
        stack.s3.kill()
    else:
        kill(found[run.victim]())


def one_of(processes, preferred: int):
    """The one with that pid, if it is among them, else any."""
    return [each for each in processes if each.pid == preferred] or processes[:1]


def bring_back(run: MatrixRun, iteration: int) -> None:
    """What docs/operations.md says one does."""
    if VICTIMS[run.victim] == BY_ITSELF:
        return
    if run.victim == "MLflow":
        run.wait_for(iteration)  # it is still away when the iteration wants to tell it something
    time.sleep(AWAY_SECONDS)
    if run.victim == "S3 server":
        run.stack.s3.start()
    else:
        run.stack.up()


def ended(record) -> float:
    """Unix seconds."""
    return float(record["started_at"]) + float(record["seconds"])


@dataclass
class Table:
    """Seconds lost by victim and stage; None for a cell that failed."""

    lost: dict[tuple[str, str], float | None] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: Markdown."""
        victims = [victim for victim in VICTIMS if any(of == victim for of, _ in self.lost)]
        head = f"| {'killed':<15} | " + " | ".join(f"{stage:>11}" for stage in STAGES) + " |"
        rule = "|" + "-" * 17 + "|" + "|".join("-" * 12 + ":" for _ in STAGES) + "|"
        rows = [
            f"| {victim:<15} | " + " | ".join(f"{self._cell(victim, stage):>11}" for stage in STAGES) + " |"
            for victim in victims
        ]
        return [head, rule, *rows]

    def _cell(self, victim: str, stage: str) -> str:
        if (victim, stage) not in self.lost:
            return ""
        seconds = self.lost[victim, stage]
        return "FAILED" if seconds is None else f"{seconds:.0f} s"

"""A run that is killed anywhere, and cleared of garbage after each death, is the run that was never disturbed."""

import asyncio
import random

import pytest
from filling_rig import Answers, Rig, place

from rlhf_core.records import Stage
from rlhf_core.storage import ObjectStore
from rlhf_core.storage.audit.garbage import find_garbage, remove_garbage
from rlhf_core.storage.audit.verification import verify
from tasks.due import iterations_to_do

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

PLAIN = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2")
OVER = (*PLAIN, "rollout.vllm_generate_batch_size=4")
FILTERED = (*PLAIN, "rollout.vllm_generate_batch_size=3", "algo.dynamic_filtering_enable=true")
PROMPTS = 9
EXECUTE = Answers.execute


class Power(BaseException):
    """It is off: nothing of the process goes on, no handler either."""


def script(found):
    """Every third prompt is solved, and filtered out where that is asked for."""
    return (1.0, 1.0) if found[1] % 3 == 2 else (0.0, 1.0)


def dies_after(monkeypatch, writes):
    """The process is gone before its object number ``writes`` + 1 appears."""
    left = [writes]

    def counted(act):
        def write(self, path, *arguments, **options):
            if not path.startswith("lease/"):
                left[0] -= 1
                if left[0] < 0:
                    raise Power(path)
            return act(self, path, *arguments, **options)

        return write

    context = monkeypatch.context()
    patched = context.__enter__()
    for name in ("put", "put_once"):
        patched.setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))
    return context


def made(rig):
    """What a run came to: the rows that were trained, in order, with their rewards."""
    found = []
    for iteration in rig.store.completed_iterations():
        rows = rig.store.read_experience(rig.store.stage(iteration, Stage.EXPERIENCE)[0].parts)
        found.append(sorted((row.group_id, row.sample_index, row.reward, tuple(row.token_ids)) for row in rows))
    return found


def published(rig):
    """Places of the groups whose rows are durable: nobody samples them again."""
    parts = [part for k in rig.store.iterations() for part in rig.store.published_parts(k, Stage.ROLLOUT)]
    return {place(row.group_id) for row in rig.store.read_trajectories(parts)}


def new_rig(monkeypatch, overrides):
    """Groups are finished one after the other, so that each is a part of its own."""
    execute = EXECUTE

    async def in_turn(self, episode):
        await asyncio.sleep(0.01 * place(episode.group_id)[1])
        return await execute(self, episode)

    monkeypatch.setattr(Answers, "execute", in_turn)
    rig = Rig(monkeypatch, PROMPTS, script, *overrides)
    rig.store.write_run({"run_id": "run"})
    return rig


@pytest.mark.parametrize("overrides", [PLAIN, OVER, FILTERED], ids=["at once", "ahead", "filtered"])
@pytest.mark.parametrize("seed", range(2))
async def test_garbage_is_removed_after_every_death_and_nothing_is_missed(monkeypatch, overrides, seed):
    whole = new_rig(monkeypatch, overrides)
    await whole.train(whole.start())
    assert find_garbage(whole.store).pieces == ()
    rig, dice = new_rig(monkeypatch, overrides), random.Random(seed)
    deaths, removed, durable = 0, 0, set()

    while iterations_to_do(rig.start()):
        run = rig.start()
        dying = dies_after(monkeypatch, dice.randrange(10))
        try:
            await rig.train(run, iterations=dice.choice([1, None]))
        except Power:
            deaths += 1
        finally:
            dying.__exit__(None, None, None)
        assert not durable & set(run.session.player.sampled)
        durable = published(rig)
        for done in rig.store.completed_iterations():  # as if another attempt had made other rows
            rig.store.objects.put(f"iterations/{done:08d}/rollout/000001r-5t-1b-{deaths:064x}.arrow", b"x")
        removed += len(remove_garbage(rig.store).pieces)
        assert verify(rig.store).ok

    assert deaths > 3
    assert removed > 2
    assert made(rig) == made(whole)
    assert rig.total == whole.total

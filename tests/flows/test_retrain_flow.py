"""Turns of a retraining on a real Prefect server, a real MLflow registry and real logs; the training run is scripted."""

import asyncio

import pytest
from mlflow import MlflowClient
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.responses import SetStateStatus
from prefect.input import keyset_from_paused_state
from prefect.input.actions import create_flow_run_input_from_model
from prefect.states import Paused
from retrain_rig import Rig, artifacts

from flows import retrain as retrain_flow
from rlhf_core.errors import ConfigError, StorageError
from rlhf_core.lineage import make_registry
from rlhf_core.storage import LeaseOwner, RunStore, acquire
from tasks import retrain as retrain_tasks
from tasks.approval import Approval, _key, _stored
from tasks.retraining import abandon_turn, claim, resolve_retraining

pytestmark = pytest.mark.stack


@pytest.fixture
def rig(prefect_api, mlflow_uri, tmp_path, monkeypatch, request):
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")[:80]
    made = Rig(str(tmp_path / "runs"), mlflow_uri, name)
    made.prompts(4)
    monkeypatch.setattr(retrain_flow, "train", made.training())
    return made


@pytest.fixture
def registry(rig):
    return make_registry(rig.mlflow_uri, rig.name)


async def test_promoted_then_refused_then_nothing_new(rig, registry):
    rig.scores, rig.draws = {1: (0.2, 0.5), 2: (0.5, 0.55)}, {1: 3}

    first = await rig.turn()
    rig.prompts(6)
    second = await rig.turn()
    third = await rig.turn()

    assert [state.name for state in (first, second, third)] == ["Completed"] * 3
    assert first.message == (
        "turn 1 promoted: eval/score_mean 0.5 against the champion's 0.2: +0.3000 ± 0.022 on 4 prompts, margin 0.1 met"
    )
    assert second.message.startswith("turn 2 refused: eval/score_mean 0.55 against the champion's 0.5: +0.0500")
    assert third.message == "nothing to train on: 0 of 6 prompts are new (min_new_prompts=1)"
    champion, latest = registry.version("champion"), registry.version("latest")
    assert (champion.number, champion.checkpoint.run_id, latest.number) == (1, f"{rig.name}-0001", 2)
    # The second turn trained the champion, on what the first had not sampled.
    second_config = rig.configs[f"{rig.name}-0002"]
    assert rig.ran == [f"{rig.name}-0001", f"{rig.name}-0002"]
    assert rig.configs[rig.ran[0]]["actor"]["model_name_or_path"] == "builtin:tiny"
    assert second_config["actor"]["model_name_or_path"] == f"run:file://{rig.root}/{rig.name}-0001@1"
    assert rig.log.store.objects.read(rig.log.turn(2).rows) == b'["row-3", "row-4", "row-5"]'
    assert rig.log.seen() == {f"row-{i}" for i in range(6)}


async def test_the_retry_of_a_flow_run_whose_turn_is_over_begins_no_other(rig):
    rig.scores = {1: (0.2, 0.5)}
    await rig.turn()
    rig.prompts(9)

    retraining = await claim(resolve_retraining(rig.retraining(), []))
    begun = await retrain_tasks.begin_turn.fn(retraining, rig.log.turn(1).flow_run_id)

    assert begun.turn == rig.log.turn(1)
    assert rig.log.numbers() == [1]


async def test_a_refusal_is_kept_everywhere_and_nobodys_start(rig, registry, mlflow_uri):
    """Nobody is asked about it. Without a champion the next turn starts where this one did, not at `latest` of the registry."""
    rig.scores = {1: (0.5, 0.2), 2: (0.5, 0.9)}

    await rig.turn("margin=0.05", "approval.enable=true")
    rig.prompts(5)
    second = await rig.turn()

    decision = rig.log.decision(1)
    assert (decision["verdict"], decision["margin"], decision["champion"]["found_as"]) == ("refused", 0.05, "config")
    assert decision["numbers"]["difference"] == pytest.approx(-0.3)
    tags = MlflowClient(tracking_uri=mlflow_uri).get_model_version(rig.name, "1").tags
    assert (tags["retrain.verdict"], tags["retrain.compared_with"]) == ("refused", "builtin:tiny")
    shown = await artifacts(f"{rig.name}-decision")
    assert "| champion | 0.5000 | 4 prompts | `builtin:tiny` |" in shown[0].splitlines()
    assert (rig.log.turn(2).start, second.message[:15]) == ("builtin:tiny", "turn 2 promoted")


async def test_a_broken_turn_goes_on_though_the_prompts_grew(rig):
    rig.scores, rig.breaks = {1: (0.2, 0.5)}, [1]
    with pytest.raises(RuntimeError, match="on purpose"):
        await (await rig.turn()).aresult()
    rig.prompts(9)

    state = await rig.turn()

    assert state.message.startswith("turn 1 promoted")
    assert rig.ran == [f"{rig.name}-0001"] * 2
    assert rig.log.seen() == {f"row-{i}" for i in range(4)}


async def test_a_broken_turn_with_another_configuration_is_refused_until_it_is_given_up(rig):
    rig.scores, rig.breaks = {1: (0.2, 0.5), 2: (0.2, 0.6)}, [1]
    await rig.turn()

    refused = await rig.turn("actor.eps_clip=0.3")
    retraining = await claim(resolve_retraining(rig.retraining(), []))
    given_up = abandon_turn(retraining)
    retraining.lease.release()
    state = await rig.turn("actor.eps_clip=0.3")

    with pytest.raises(ConfigError, match=r"turn 1 of .*\(actor.eps_clip: 0.2 in the run, 0.3 now\).*--abandon"):
        await refused.aresult()
    assert given_up == 1
    assert state.message.startswith("turn 2 promoted")
    assert rig.log.turn(2).row_count == 4


async def test_a_process_that_died_between_decision_and_promotion_promotes(rig, registry, monkeypatch):
    rig.scores = {1: (0.2, 0.5)}
    with monkeypatch.context() as patch:
        patch.setattr(retrain_tasks, "_tell_registry", lambda *_: raised(StorageError("died")))
        assert (await rig.turn()).is_failed()
    assert registry.version("champion") is None

    state = await rig.turn()

    assert state.message.startswith("turn 1 promoted")
    assert registry.version("champion").number == 1
    assert rig.ran == [f"{rig.name}-0001"]


async def test_a_champion_that_changed_meanwhile_stays(rig, registry):
    rig.scores = {1: (0.2, 0.5), 2: (0.5, 0.45), 3: (0.5, 0.9)}
    await rig.turn()
    rig.prompts(5)
    await rig.turn()
    rig.prompts(6)
    learn = rig._learn

    def learn_and_someone_promotes(run, number):
        learn(run, number)
        registry.promote(2)

    rig._learn = learn_and_someone_promotes
    state = await rig.turn()

    assert state.message.startswith("turn 3 refused: the champion changed during the turn, to version 2")
    assert registry.version("champion").number == 2


async def test_a_second_start_of_a_turn_under_way_is_refused_with_the_owner_named(rig):
    lease = rig.other_process()

    state = await rig.turn()

    assert (state.type.value, rig.ran) == ("CANCELLED", [])
    assert "is held by process 1 on elsewhere" in state.message
    assert lease.generation == 1


async def test_a_retry_waits_for_the_earlier_attempt_of_its_flow_run(rig):
    """It died in another container: nobody can tell, until its lease expires."""
    store = RunStore(rig.name, rig.root)
    acquire(store, LeaseOwner("elsewhere", "m", 1, 0.0, "earlier", "this flow run"), 1)

    retraining = await claim(resolve_retraining(rig.retraining(), []), "this flow run")

    assert retraining.lease.generation == 2


async def test_a_champion_whose_run_was_made_anew_is_refused(rig):
    """The same folder, with other weights than were registered."""
    rig.scores = {1: (0.2, 0.5)}
    await rig.turn()
    rig.prompts(5)
    marker = rig.folder / "runs" / f"{rig.name}-0001" / "checkpoints" / "v00000001" / "checkpoint.json"
    from rlhf_core.storage.documents import decode_document, encode_document

    body = decode_document(marker.read_bytes(), "u")
    marker.chmod(0o644)
    marker.write_bytes(encode_document({**body, "digest": "another"}, "u"))

    state = await rig.turn()

    with pytest.raises(ConfigError, match="champion of .* version 1, but .* holds other weights than were registered"):
        await state.aresult()


# --- approval


async def answer(rig, values):
    """Wait for the paused flow run, and send what the form of its page sends. Returns what the page shows."""
    paused = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Paused"])))
    async with get_client() as client, asyncio.timeout(60):
        mine = []
        while not mine:
            runs = await client.read_flow_runs(flow_run_filter=paused)
            mine = [run for run in runs if run.parameters.get("config", {}).get("name") == rig.name]
        keyset = mine[0].state.state_details.run_input_keyset
        while not await client.filter_flow_run_input(mine[0].id, keyset["description"], 1, set()):
            await asyncio.sleep(0.1)  # the state comes before the form
        shown = await client.read_flow_run_input(mine[0].id, keyset["description"])
        answered = await client.resume_flow_run(mine[0].id, run_input=values)
        assert answered.status is SetStateStatus.ACCEPT, answered.details
    return shown


@pytest.mark.parametrize(("approve", "verdict"), [(True, "promoted"), (False, "refused")])
async def test_a_human_has_the_last_word(rig, registry, approve, verdict, monkeypatch):
    """Also where the process died after the answer: its retry does not ask again."""
    rig.scores = {1: (0.2, 0.5)}
    decide, deaths = retrain_tasks._decision, [StorageError("died")]
    monkeypatch.setattr(retrain_tasks, "_decision", lambda *_: raised(deaths.pop()) if deaths else decide(*_))
    retried = retrain_flow.retrain.with_options(retries=2, retry_delay_seconds=0)  # a pause counts as a run
    async with asyncio.TaskGroup() as together:
        turn = together.create_task(retried(rig.retraining(), ["approval.enable=true"], return_state=True))
        page = together.create_task(answer(rig, {"approve": approve, "comment": "read ten answers"}))
    shown, state = page.result(), turn.result()

    assert deaths == []
    assert "| challenger | 0.5000 | 4 prompts | `run:" in shown
    assert state.message.startswith(f"turn 1 {verdict}")
    assert rig.log.decision(1)["approval"]["comment"] == "read ten answers"
    assert ("a human declined: read ten answers" in state.message) is not approve
    assert (registry.version("champion") is not None) is approve


def raised(error):
    raise error


async def test_an_answer_about_one_turn_is_none_about_the_next(prefect_api):
    """A flow run goes on with the turn of another one, which then ends it: the retry of the first makes the next turn."""

    @flow
    async def stored():
        pause = Paused(pause_key=_key("turn-1", 1))
        await create_flow_run_input_from_model(keyset_from_paused_state(pause)["response"], Approval(approve=True))
        return await _stored(_key("turn-1", 1)), await _stored(_key("turn-2", 1))

    first, second = await stored()

    assert (first.approve, second) == (True, None)


async def test_nobody_answers(rig, registry):
    rig.scores = {1: (0.2, 0.5)}

    state = await rig.turn("approval.enable=true", "approval.timeout=1")

    assert state.name == "Completed"
    assert state.message.startswith("turn 1 refused: nobody answered within 1 s")
    assert registry.version("champion") is None

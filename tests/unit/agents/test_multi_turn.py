"""Episodes of several turns, token by token."""

import pytest
from agent_script import numbers
from turn_script import (
    CLOSE,
    Answers,
    Speaks,
    actions_of,
    chat,
    goes_on,
    ids,
    is_done,
    plain,
    play_turns,
    tokenizer,
    user,
)

from rlhf_core.errors import AgentError
from rlhf_core.records import StepReward, StopReason, action_mask

pytestmark = pytest.mark.agents


async def test_three_turns_against_a_table():
    """The newline behind <|im_end|> is the template's, so it has mask 0 (CASE 74), and the rewards lie at the ends of turns.

    ====  ==============================================  ====  =============  ======
    at    text                                            mask  log-probs      reward
    ====  ==============================================  ====  =============  ======
    0     <|bos|><|im_start|>user⏎hi<|im_end|>⏎           0
    11    <|im_start|>assistant⏎                          0
    22    A<|im_end|>                                     1     -1 -2          .2
    24    ⏎<|im_start|>user⏎no<|im_end|>⏎                 0
    35    <|im_start|>assistant⏎                          0
    46    BC<|im_end|>                                    1     -3 -4 -5       0
    49    ⏎<|im_start|>user⏎hm<|im_end|>⏎                 0
    60    <|im_start|>assistant⏎                          0
    71    D<|im_end|>                                     1     -6 -7          1
    ====  ==============================================  ====  =============  ======
    """
    policy = Speaks(f"A{CLOSE}", f"BC{CLOSE}", f"D{CLOSE}")
    agent = Answers([goes_on(user("no"), rewards=0.2), goes_on([user("hm")], rewards=0), is_done(rewards=1)])

    [row] = await play_turns(policy, agent)

    talk = [user("hi"), said("A"), user("no"), said("BC"), user("hm"), said("D")]
    at_once = tokenizer().apply_chat_template(talk, tokenize=True, return_dict=False)
    assert row.token_ids.tolist() == at_once[:-1]  # all but the newline behind the last turn
    assert row.action_ranges == ((22, 24), (46, 49), (71, 73))
    assert action_mask(row.action_ranges, 73).nonzero()[0].tolist() == [22, 23, 46, 47, 48, 71, 72]
    assert numbers(row.rollout_logprobs[row.rollout_logprobs != 0]) == [-1, -2, -3, -4, -5, -6, -7]
    assert numbers(row.rollout_logprobs[46:49]) == [-3, -4, -5]
    assert row.version_spans == ((22, 24, 7), (46, 49, 7), (71, 73, 7))
    assert row.step_rewards == (StepReward(23, 0.2), StepReward(48, 0.0), StepReward(72, 1.0))  # CASE 86
    assert (row.reward, row.score, row.stop_reason) == (1.2, 1.2, StopReason.DONE)


async def test_each_turn_is_asked_with_all_that_was_before_it_and_a_seed_of_its_own():
    policy = Speaks(f"A{CLOSE}", f"B{CLOSE}")

    [row] = await play_turns(policy, Answers([goes_on(user("no")), is_done()]))

    first, second = policy.requests
    assert first.prompt_token_ids == row.token_ids[:22].tolist()
    assert second.prompt_token_ids == row.token_ids[:46].tolist()
    assert first.sampling.seed == 100 != second.sampling.seed
    assert first.request_id != second.request_id
    assert first.affinity == second.affinity == "g0"


async def test_what_was_sampled_is_never_tokenised_again():
    """CASE 73: "th" is one id of the vocabulary, which encoding never gives."""
    th = 260 + "etaoinshr".index("t") * 9 + "etaoinshr".index("h")
    policy = Speaks("A", "B")

    async def generate(request):
        answer = await Speaks.generate(policy, request)
        answer.token_ids[0] = th
        return answer

    policy.generate = generate

    [row] = await play_turns(policy, Answers([goes_on("!"), is_done()]), plain())

    assert actions_of(row) == [[th], [th]]
    assert row.answer == "th"


async def test_text_of_the_environment_is_taken_verbatim():
    """OpenRLHF's contract: special tokens in it are recognised, no BOS is put before it."""
    [row] = await play_turns(Speaks("A", "B"), Answers([goes_on(f"\nno{CLOSE}B: "), is_done()]), plain("ab"))

    assert row.token_ids.tolist() == [256, *ids("ab"), *ids("A"), *ids(f"\nno{CLOSE}B: "), *ids("B")]
    assert row.messages is None


@pytest.mark.parametrize(
    ("first", "expected"), [(f"A{CLOSE}", f"A{CLOSE}\n"), ("A", f"A{CLOSE}\n")], ids=["closed", "stopped"]
)
async def test_a_turn_that_the_policy_did_not_close_is_closed_by_the_feedback(first, expected):
    [row] = await play_turns(Speaks(first, "B"), Answers([goes_on(user("no")), is_done()]))

    start, end = row.action_ranges[0]
    assert tokenizer().decode(row.token_ids[start : start + 3]) == expected
    assert end - start == len(ids(first))


async def test_what_the_environment_is_told():
    agent = Answers([goes_on(user("no")), is_done()])
    prompt = chat(user("hi"))

    await play_turns(Speaks(f"A{CLOSE}", f"B{CLOSE}"), agent, prompt, sample=3, environment_seed=11)

    assert agent.reset_states == {
        "observation": prompt.text,
        "prompt": prompt.text,
        "label": 7,
        "messages": [user("hi")],
        "datasource": "chat",
        "seed": 11,
        "sample": 3,
    }
    first, second = agent.states
    assert (first["observation_text"], first["action_text"], first["label"]) == (prompt.text, "A", 7)
    assert second["observation_text"].endswith("user\nno<|im_end|>\n<|im_start|>assistant\n")
    assert (second["turn"], second["tokens_left"], second["context_left"]) == (1, 196, 400 - 48)
    assert second["sampling_params"].temperature == 1.0
    assert agent.closed == 1


async def test_what_people_and_reward_functions_read():
    [row] = await play_turns(Speaks(f"A{CLOSE}", f"B{CLOSE}"), Answers([goes_on(user("no")), is_done()]))

    assert row.answer == "B"
    assert row.messages == [user("hi"), said("A"), user("no")]
    assert row.transcript == f"A{CLOSE}\n<|im_start|>user\nno{CLOSE}\n<|im_start|>assistant\nB{CLOSE}"
    assert row.prompt == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_observation_of_reset_replaces_the_prompt():
    """CASE 92: two samples of one prompt whose resets give 5 and 8 tokens."""
    rows = [
        (await play_turns(Speaks("A"), Answers([is_done()], {"observation": text}), plain("ab")))[0]
        for text in ("abcd", "abcdefg")
    ]

    assert [row.action_ranges[0].start for row in rows] == [5, 8]
    assert [row.token_ids[0] for row in rows] == [256, 256]  # the BOS that the prompt had
    assert [row.prompt for row in rows] == ["abcd", "abcdefg"]


async def test_messages_of_reset_are_rendered():
    prompt, observation = chat(user("hi")), [{"role": "system", "content": "be"}, user("ho")]

    [row] = await play_turns(Speaks("A"), Answers([is_done()], {"observation": observation}), prompt)

    expected = tokenizer().apply_chat_template(
        observation, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert row.token_ids[: len(expected)].tolist() == expected
    assert row.messages == observation


async def test_a_template_without_a_continuation_starts_a_new_segment():
    """It refuses an assistant turn that nothing came before, as the stand-in has one: so all is rendered anew."""
    template = (
        "{% for m in messages %}{% if m.content == 'u' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    policy, agent = Speaks("A", "B"), Answers([goes_on(user("no"), rewards=1), is_done(rewards=2)])

    rows = await play_turns(policy, agent, chat_template=template)

    assert [(row.segment_index, row.answer, row.reward, row.stop_reason) for row in rows] == [
        (0, "A", 3.0, StopReason.DONE),
        (1, "B", 3.0, StopReason.DONE),
    ]
    assert rows[1].token_ids.tolist() == ids("u:hi;a:A;u:no;a:B")
    assert [row.step_rewards[0].reward for row in rows] == [1.0, 2.0]


# --- rewards


async def test_no_rewards_leave_the_episode_to_the_reward_section():
    [row] = await play_turns(Speaks("A", "B"), Answers([goes_on("!"), is_done(rewards=None, scores=1)]))

    assert (row.reward, row.score, row.step_rewards) == (None, 1.0, ())


async def test_the_last_score_and_the_extra_logs_are_kept():
    steps = [
        goes_on("!", scores=0.1, extra_logs={"hits": 1, "note": "x"}),
        goes_on("!", scores=0.5),
        is_done(rewards=2),
    ]

    [row] = await play_turns(Speaks("A", "B", "C"), Answers(steps))

    assert (row.reward, row.score) == (2.0, 0.5)
    assert row.metrics == {
        "agent/turns": 3.0,
        "agent/cut_turns": 0.0,
        "agent/dropped_logs": 1.0,
        "agent/hits": 1.0,
    }


# --- limits


async def test_turns_and_total_have_limits_of_their_own():
    """CASE 81: per turn 20, total 50, short replies: 20, 20, 10."""
    agent = Answers([goes_on("!"), goes_on("!"), goes_on("!")])

    [row] = await play_turns(Speaks("x" * 99, "x" * 99, "x" * 99), agent, plain(), total=50, turn=20)

    assert [end - start for start, end in row.action_ranges] == [20, 20, 10]
    assert row.stop_reason is StopReason.LENGTH
    assert row.metrics["agent/cut_turns"] == 2


async def test_the_context_has_a_limit():
    """CASE 81, 82: per turn 20, total 50, window 100, replies of 30: two turns fit, and the third reply does not."""
    agent = Answers([goes_on("y" * 30), goes_on("y" * 30), is_done()])

    [row] = await play_turns(Speaks("x" * 99, "x" * 99, "x" * 99), agent, plain(), total=50, turn=20, max_len=100)

    assert row.token_ids.tolist() == [256, *ids("ab" + "x" * 20 + "y" * 30 + "x" * 20)]
    assert row.stop_reason is StopReason.CONTEXT_FULL
    assert row.stop_reason.truncated


async def test_the_window_fills_in_the_middle_of_a_turn():
    """CASE 82: and the action that was cut off is still rewarded."""
    agent = Answers([goes_on("y" * 30, rewards=1), goes_on("!", rewards=0.5)])

    [row] = await play_turns(Speaks("x" * 20, "x" * 99), agent, plain(), max_len=60)

    assert len(row.token_ids) == 60
    assert (row.stop_reason, row.reward) == (StopReason.CONTEXT_FULL, 1.5)
    assert row.step_rewards[-1].position == 59


@pytest.mark.parametrize(
    ("said", "limits", "done", "expected"),
    [
        ("xxx", {"total": 3}, True, StopReason.DONE),  # said all it wanted
        ("xxxx", {"total": 3}, True, StopReason.LENGTH),  # cut off, whatever the environment says
        ("xxxx", {"max_len": 6}, True, StopReason.CONTEXT_FULL),
        ("xxxx", {"turn": 3}, True, StopReason.DONE),
        ("xxx", {"total": 3}, False, StopReason.LENGTH),
        ("xxx", {"max_len": 6}, False, StopReason.CONTEXT_FULL),
        ("xxx", {"turns": 1}, False, StopReason.MAX_TURNS),
        ("xxx", {"turns": 1}, True, StopReason.DONE),
        ("xxx", {"max_len": 7}, False, StopReason.CONTEXT_FULL),  # one token of feedback, and none to act
    ],
)
async def test_why_it_ended(said, limits, done, expected):
    [row] = await play_turns(Speaks(said), Answers([goes_on("!") | {"done": done}]), plain("ab"), **limits)

    assert row.stop_reason is expected


async def test_a_first_observation_without_room_is_a_failure():
    with pytest.raises(AgentError, match=r"has 6 tokens and leaves no room for an action in data\.max_len=6"):
        await play_turns(Speaks("A"), Answers([is_done()], {"observation": "abcde"}), plain("ab"), max_len=6)


async def test_the_environment_may_shorten_the_next_turn():
    steps = [goes_on("!", sampling_params={"max_tokens": 2}), goes_on("!", sampling_params=None), is_done()]

    [row] = await play_turns(Speaks("xxxx", "xxxx", "xxxx"), Answers(steps), plain())

    assert [end - start for start, end in row.action_ranges] == [4, 2, 2]


async def test_sampling_params_that_come_back_as_they_were_are_fine():
    class Returns(Answers):
        def step(self, states):
            return super().step(states) | {"sampling_params": states["sampling_params"]}

    [row] = await play_turns(Speaks("xx", "xx"), Returns([goes_on("!"), is_done()]), plain())

    assert row.stop_reason is StopReason.DONE


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": 0.5}, r"temperature=0\.5, where the run samples with 1\.0: .* set rollout\.temperature"),
        ({"stop": ["x"]}, r"stop=\['x'\]"),
        ({"seed": 3}, r"seed=3.* set train\.seed"),
        ({"max_token": 3}, "unknown field 'max_token'"),
        ({"max_tokens": 0}, "max_tokens=0: a positive number"),
    ],
)
async def test_sampling_is_the_trainers(settings, problem):
    with pytest.raises(AgentError, match=f"sampling_params of step 0 .*{problem}"):
        await play_turns(Speaks("A"), Answers([goes_on("!", sampling_params=settings)]))


# --- failures


async def test_the_environment_is_closed_when_it_fails():
    agent = Answers([ValueError("broken")])

    with pytest.raises(ValueError, match="broken"):
        await play_turns(Speaks("A"), agent)

    assert agent.closed == 1


async def test_an_environment_that_says_nothing_is_a_failure():
    with pytest.raises(AgentError, match="neither done nor environment_feedback"):
        await play_turns(Speaks("A"), Answers([{"rewards": 1}]))


async def test_images_for_a_model_without_eyes_are_a_failure():
    with pytest.raises(AgentError, match=r"1 images, and the run takes none: set data\.max_images_per_prompt"):
        await play_turns(Speaks("A"), Answers([goes_on("see", environment_images=[b"png"])]))


def said(text):
    return {"role": "assistant", "content": text}

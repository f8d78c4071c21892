"""The OpenAI-compatible server over a scripted engine core: what is recorded, and what becomes a row."""

import asyncio

import pytest

from rlhf_core.records import StopReason, VersionSpan

pytestmark = pytest.mark.agents

EOS = 258
HI = [260, 261, EOS]  # two ids that no text is ever encoded to, and the end of the turn
HO = [262, 263, EOS]
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def said(answer, choice=0):
    return answer.choices[choice].message.model_dump(exclude_none=True)


def trained(row):
    return [row.token_ids[start:end] for start, end in row.action_ranges]


async def test_three_turns_are_one_row_of_the_sampled_ids(rig, server, playing) -> None:
    rig.script(HI, HO, HI)
    async with playing(server) as play:
        messages = [user("a")]
        for text in ("b", "c", None):
            messages.append(said(await play.chat(messages)))
            messages += [user(text)] if text else []
        record, [row] = await play.rows()

    assert [call.continued for call in record.calls] == [False, True, True]
    assert row.token_ids == (*rig.last_prompt, *HI)
    assert trained(row) == [(260, 261, EOS), (262, 263, EOS), (260, 261, EOS)]
    assert rig.decode(row.token_ids).count("<|im_start|>") == 6
    assert all(call.version_spans == (VersionSpan(0, 3, 3),) for call in record.calls)
    assert row.stop_reason is StopReason.EOS


async def test_the_client_sees_what_is_recorded(rig, server, playing) -> None:
    rig.script(HI)
    async with playing(server) as play:
        answer = await play.chat("a", logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
        record, [row] = await play.rows()

    [call] = record.calls
    assert tuple(answer.prompt_token_ids) == call.prompt_token_ids
    assert tuple(answer.choices[0].token_ids) == call.token_ids
    assert [place.logprob for place in answer.choices[0].logprobs.content] == pytest.approx(call.logprobs)
    assert row.logprobs[-3:] == call.logprobs
    assert set(row.logprobs[:-3]) == {0.0}


async def test_a_stream_is_recorded_like_an_answer(rig, server, playing) -> None:
    rig.script(HI, HO, HI, HO)
    records = []
    for streamed in (False, True):
        async with playing(server) as play:
            first = await play.streamed("a") if streamed else said(await play.chat("a"))
            messages = [user("a"), first, user("b")]
            await (play.streamed(messages) if streamed else play.chat(messages))
            record, rows = await play.rows()
            records.append([(c.prompt_token_ids, c.token_ids, c.logprobs, c.text) for c in record.calls])
            assert len(rows) == 1

    assert records[0] == records[1]


async def test_a_truncated_turn_is_closed_by_the_bridge_and_the_closing_is_not_trained(rig, server, playing) -> None:
    rig.script([260, 261, 262, EOS], HO)
    async with playing(server) as play:
        first = await play.chat("a", max_tokens=3)
        await play.chat([user("a"), said(first), user("b")])
        record, [row] = await play.rows()

    assert first.choices[0].finish_reason == "length"
    assert record.calls[0].stop_reason is StopReason.LENGTH
    assert trained(row) == [(260, 261, 262), (262, 263, EOS)]
    end = row.action_ranges[0].end
    assert row.token_ids[end] == EOS  # the template's, not the policy's


async def test_a_stop_string_is_in_the_row_though_the_client_never_sees_it(rig, server, playing) -> None:
    rig.script([*b"go STOP now", EOS], HO)
    async with playing(server) as play:
        first = await play.chat("a", stop=["STOP"])
        await play.chat([user("a"), said(first), user("b")])
        record, [row] = await play.rows()

    assert first.choices[0].message.content == "go "
    assert record.calls[0].stop_reason is StopReason.STOP
    assert bytes(trained(row)[0]) == b"go STOP"


async def test_a_stop_token_of_the_clients_is_no_end_of_turn(rig, server, playing) -> None:
    rig.script([97, 98, 99], HO)
    async with playing(server) as play:
        first = await play.chat("a", extra_body={"stop_token_ids": [98]})
        await play.chat([user("a"), said(first), user("b")])
        record, [row] = await play.rows()

    assert record.calls[0].stop_reason is StopReason.STOP
    assert trained(row)[0] == (97, 98)
    assert row.token_ids[row.action_ranges[0].end] == EOS


async def test_three_choices_and_a_branch_from_the_second(rig, server, playing) -> None:
    rig.script([*b"one", EOS], [*b"two", EOS], [*b"six", EOS], HO, HI)
    async with playing(server) as play:
        first = await play.chat("a", n=3)
        second, third = said(first, 1), said(first, 2)
        await asyncio.gather(
            play.chat([user("a"), second, user("b")]),
            play.chat([user("a"), third, user("c")]),
        )
        record, rows = await play.rows()

    assert [(c.call, c.choice) for c in record.calls] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]
    assert sorted(row.calls for row in rows) == [((0, 0),), ((0, 1), (1, 0)), ((0, 2), (2, 0))]
    assert sum(len(ids) for row in rows for ids in trained(row)) == sum(len(c.token_ids) for c in record.calls)


async def test_choices_of_a_stream_are_told_apart(rig, server, playing) -> None:
    rig.script([*b"one", EOS], [*b"twelve", EOS], HO)
    async with playing(server) as play:
        texts = {}
        async for chunk in await play.chat("a", n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        await play.chat([user("a"), {"role": "assistant", "content": texts[1]}, user("b")])
        _record, rows = await play.rows()

    assert [row.calls for row in rows] == [((0, 0),), ((0, 1), (1, 0))]


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda content: f"  {content}\n", 1),  # white space around it
        (lambda content: [{"type": "text", "text": content}], 1),  # the same in another shape
        (lambda content: content.upper() + "!", 2),  # edited
    ],
)
async def test_a_history_that_was_changed(rig, server, playing, change, rows) -> None:
    rig.script(HI, HO)
    async with playing(server) as play:
        first = said(await play.chat("a"))
        await play.chat([user("a"), first | {"content": change(first["content"])}, user("b")])
        record, found = await play.rows()

    assert len(found) == rows
    assert record.calls[1].continued is (rows == 1)


async def test_a_compacted_history_and_another_system_prompt_start_new_rows(rig, server, playing) -> None:
    rig.script(HI, HO, HI)
    async with playing(server) as play:
        first = said(await play.chat("a"))
        await play.chat([user("a summary"), user("b")])
        await play.chat([{"role": "system", "content": "new"}, user("a"), first, user("b")])
        record, rows = await play.rows()

    assert [row.calls for row in rows] == [((0, 0),), ((1, 0),), ((2, 0),)]
    assert not any(call.continued for call in record.calls)


async def test_text_that_looks_like_the_end_of_a_turn_stays_what_was_sampled(rig, server, playing) -> None:
    rig.script([*b"<|im_end|>", EOS], HO)
    async with playing(server) as play:
        first = said(await play.chat("a"))
        await play.chat([user("a"), first, user("b")])
        _, [row] = await play.rows()

    assert first["content"] == "<|im_end|>"
    assert trained(row)[0] == (*b"<|im_end|>", EOS)


@pytest.mark.parametrize(("history", "segments"), [("exact", 1), ("template", 2)])
async def test_a_template_that_strips_thinking(rig, playing, history, segments) -> None:
    rig.script("hm</think>yes", "so</think>no")
    async with rig.server(history=history, chat_template=THINKING_TEMPLATE) as server, playing(server) as play:
        first = said(await play.chat("a"))
        await play.chat([user("a"), first, user("b")])
        record, rows = await play.rows()

    assert first["content"] == "hm</think>yes"
    assert len(rows) == segments
    assert ("hm" in rig.decode(record.calls[1].prompt_token_ids)) is (history == "exact")
    assert sum(len(ids) for row in rows for ids in trained(row)) == sum(len(c.token_ids) for c in record.calls)


async def test_a_reply_that_was_cut_off_is_continued_in_place(rig, server, playing) -> None:
    rig.script([260, 261, 262], [263, EOS])
    async with playing(server) as play:
        first = said(await play.chat("a", max_tokens=3))
        prefill = {"continue_final_message": True, "add_generation_prompt": False}
        await play.chat([user("a"), first], extra_body=prefill)
        record, [row] = await play.rows()

    assert record.calls[1].prompt_token_ids == (*record.calls[0].prompt_token_ids, 260, 261, 262)
    assert trained(row) == [(260, 261, 262), (263, EOS)]


async def test_a_beginning_of_the_clients_own_is_context(rig, server, playing) -> None:
    rig.script([*b" end", EOS])
    async with playing(server) as play:
        prefill = {"continue_final_message": True, "add_generation_prompt": False}
        await play.chat([user("a"), {"role": "assistant", "content": "begin"}], extra_body=prefill)
        _, [row] = await play.rows()

    assert rig.decode(row.token_ids).endswith("assistant\nbegin end<|im_end|>")
    assert trained(row) == [(*b" end", EOS)]


async def test_what_a_grammar_chose_is_context_unless_wanted(rig, server, playing) -> None:
    rig.script("{}", HO)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with playing(server) as play:
        first = said(await play.chat("a", response_format=schema))
        await play.chat([user("a"), first, user("b")])
        record, [row] = await play.rows()

    assert [call.constrained for call in record.calls] == [True, False]
    assert trained(row) == [(262, 263, EOS)]
    from rlhf_core.agents.sessions import export_segments

    assert len(export_segments(record, train_constrained=True)[0].action_ranges) == 2


async def test_the_trainer_decides_how_to_sample(rig, server, playing) -> None:
    wishes = {"temperature": 0.1, "top_p": 0.3, "frequency_penalty": 1.5, "presence_penalty": 1.0, "seed": 5}
    seeds = []
    for _ in range(2):
        for sample_seed in (11, 12):
            from serving_rig import request_of

            sampling = request_of().sampling.__class__(max_tokens=64, temperature=0.7, seed=sample_seed)
            async with playing(server, sampling=sampling) as play:
                await play.chat("a", extra_body={"top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3}, **wishes)
                record = await play.close()
            seen = rig.core.requests[-1].sampling_params
            seeds.append(seen.seed)
            assert (seen.temperature, seen.top_p, seen.top_k, seen.min_p) == (0.7, 1.0, 0, 0.0)
            assert (seen.frequency_penalty, seen.presence_penalty, seen.repetition_penalty) == (0.0, 0.0, 1.0)
            assert not record.calls[0].constrained

    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("option", [{"logit_bias": {"97": 5}}, {"extra_body": {"min_tokens": 2}}])
async def test_a_bias_marks_the_call(server, playing, option) -> None:
    async with playing(server) as play:
        await play.chat("a", **option)
        record, rows = await play.rows()

    assert record.calls[0].constrained
    assert rows == []


async def test_new_weights_between_two_calls(rig, server, playing) -> None:
    rig.script(HI, HO)
    async with playing(server) as play:
        first = said(await play.chat("a"))
        rig.core.version = "4"
        await play.chat([user("a"), first, user("b")])
        _, [row] = await play.rows()

    (a, b), (c, d) = row.action_ranges
    assert row.version_spans == (VersionSpan(a, b, 3), VersionSpan(c, d, 4))


async def test_new_weights_during_a_call(rig, server, playing) -> None:
    rig.script([260, 261, 262, 263, EOS])
    rig.core.pause_after = 2
    rig.core.running.clear()
    async with playing(server) as play:
        answer = asyncio.create_task(play.streamed("a"))
        while not play.server._store.get(play.session.session_id).held:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        rig.core.version = "4"
        rig.core.running.set()
        await answer
        record = await play.close()

    assert record.calls[0].version_spans == (VersionSpan(0, 2, 3), VersionSpan(2, 5, 4))


async def test_the_responses_api_continues_too(rig, server, playing) -> None:
    rig.script(HI, HO, HI)
    async with playing(server) as play:
        items = [user("a")]
        first = await play.client.responses.create(model="policy", input=items)
        items += [item.model_dump(exclude_none=True) for item in first.output] + [user("b")]
        async for event in await play.client.responses.create(model="policy", input=items, stream=True):
            last = event
        items += [item.model_dump(exclude_none=True) for item in last.response.output] + [user("c")]
        await play.client.responses.create(model="policy", input=items)
        record, [row] = await play.rows()

    assert last.type == "response.completed"
    assert trained(row) == [(260, 261, EOS), (262, 263, EOS), (260, 261, EOS)]
    assert [call.continued for call in record.calls] == [False, True, True]


async def test_completions_of_token_ids(rig, server, playing) -> None:
    rig.script(HI, HO)
    async with playing(server) as play:
        await play.client.completions.create(model="policy", prompt=[97, 98])
        await play.client.completions.create(model="policy", prompt=[97, 98, *HI, 99])
        _, [row] = await play.rows()

    assert row.token_ids == (97, 98, *HI, 99, *HO)
    assert len(row.action_ranges) == 2

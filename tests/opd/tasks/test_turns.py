"""Ids between turns, with chat templates in the manner of four families: nothing that was sampled is written again."""

import logging
from typing import Any

import pytest

from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.turns import Answered, check_append_only, encode_turns, with_observation
from tests.support.chat_templates import FAMILIES, family_tokenizer

APPENDING = [name for name, family in FAMILIES.items() if family.appends]
WITH_TOOLS = [name for name in FAMILIES if name != "gemma-3"]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TURNS = 30


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: family_tokenizer(family) for name, family in FAMILIES.items()}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def said(turn: int) -> str:
    """Replies that begin and end where merges could reach over, the last letters of a turn and its framing."""
    return ("a", "ok", "\na", "is it\n\n", "aa a")[turn % 5].strip() + f" {turn}"


def play(tokenizer: Any, prompt: Prompt, replies: list[str], shown: list[tuple[str, tuple[str, ...]]]) -> list[int]:
    """An episode's ids: prompt, and each reply with what follows it."""
    stops = frozenset({tokenizer.eos_token_id})
    ids = encode_prompt(prompt, tokenizer)
    for reply, (text, results) in zip(replies, shown, strict=True):
        sampled = [*ids_of(tokenizer, reply), tokenizer.eos_token_id]
        ids += sampled
        ids += encode_turns([Answered(text, prompt, sampled, results)], tokenizer, stops)[0]
    return ids


@pytest.mark.parametrize("name", APPENDING)
def test_thirty_turns_read_as_the_whole_conversation_and_keep_the_sampled_ids(
    tokenizers: dict[str, Any], name: str
) -> None:
    tokenizer, messages = tokenizers[name], [{"role": "user", "content": "Begin. aa"}]
    replies = [said(turn) for turn in range(TURNS)]
    ids = play(tokenizer, Prompt.make(list(messages)), replies, [(f"a seen {turn}", ()) for turn in range(TURNS)])
    for turn, reply in enumerate(replies):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"a seen {turn}"}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # A merge may reach from the framing into a reply when all is encoded again: those ids were never sampled.
    again = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert (ids == again) is (name == "llama-3.1")  # whose framing ends in a piece that merges no further
    place = 0
    for reply in replies:
        sampled = [*ids_of(tokenizer, reply), tokenizer.eos_token_id]
        place = next(i for i in range(place, len(ids)) if ids[i : i + len(sampled)] == sampled) + len(sampled)


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("results", [("3",), ("3", "a 4")])
def test_results_of_tools_have_the_templates_own_role(
    tokenizers: dict[str, Any], name: str, results: tuple[str, ...]
) -> None:
    tokenizer, reply = tokenizers[name], "I call."
    start = with_observation(Prompt.make([{"role": "user", "content": "Begin."}]), "Go on.", tokenizer, [TOOL])
    assert start.tools == (TOOL,)
    ids = play(tokenizer, start, [reply], [("", results)])
    messages = [*map(dict, start.messages or ()), {"role": "assistant", "content": reply}]
    messages += [{"role": "tool", "content": result} for result in results]
    whole = tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == whole


def test_a_template_without_tools_gets_them_in_words(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["gemma-3"]
    start = with_observation(Prompt.make([{"role": "user", "content": "Begin."}]), "Go on.", tokenizer, [TOOL])
    assert start.messages is not None and not start.template_options
    assert '"name": "add"' in start.messages[-1]["content"] and start.messages[-1]["content"].endswith("Go on.")
    ids = play(tokenizer, start, ["I call."], [("Next.", ("3", "4"))])
    text = tokenizer.decode(ids)
    assert (
        "<start_of_turn>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nNext." in text
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_that_was_cut_gets_its_end_from_the_environment(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    prompt, stops = Prompt.make([{"role": "user", "content": "x"}]), frozenset({tokenizer.eos_token_id})
    ends = ([tokenizer.eos_token_id], ids_of(tokenizer, "so"))
    whole, cut = encode_turns([Answered("y", prompt, sampled) for sampled in ends], tokenizer, stops)
    assert cut == [tokenizer.eos_token_id, *whole] and tokenizer.eos_token_id not in whole[:1]


def test_thinking_that_a_template_would_take_out_stays_and_is_warned_about(
    tokenizers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prompt, reply = Prompt.make([{"role": "user", "content": "x"}]), "<think>\nhm\n</think>\n\nok"
    for name, family in FAMILIES.items():
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert check_append_only(prompt, tokenizers[name]) is family.appends
            assert bool(caplog.records) is not family.appends
    tokenizer = tokenizers["qwen3"]
    ids = play(tokenizer, prompt, [reply, reply], [("y", ()), ("z", ())])
    assert tokenizer.decode(ids).count("hm") == 2
    rendered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}] * 2
    assert "hm" not in tokenizer.apply_chat_template([*rendered, {"role": "user", "content": "z"}], tokenize=False)


def test_thinking_that_is_switched_off_is_switched_off_in_every_turn(tokenizers: dict[str, Any]) -> None:
    prompt = Prompt.make([{"role": "user", "content": "x"}], template_options={"enable_thinking": False})
    text = tokenizers["qwen3"].decode(play(tokenizers["qwen3"], prompt, ["a", "a"], [("y", ()), ("z", ())]))
    assert text.count("<think>\n\n</think>\n\n") == 3  # before each of the two replies, and before the third

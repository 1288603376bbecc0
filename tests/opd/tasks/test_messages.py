"""Messages and tools arrive whole, however a file stores them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd.tasks.settings import FileSettings

CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "sum"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
]


def one(tmp_path: Path, row: dict[str, Any], **settings: Any) -> Prompt:
    """The prompt of a JSON lines file of this row and another."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(row)}\n")
    return next(
        iter(
            build_prompts(parse_settings(FileSettings, {"file": file, "heldout": 0, **settings}), seed=0).prompts(
                "train", 1
            )
        )
    )


def test_messages_keep_all_of_their_keys_and_prompts_differ_by_them_and_by_tools():
    prompt = Prompt.make(CHAT, tools=[TOOL])
    assert prompt.messages == tuple(CHAT) and prompt.tools == (TOOL,)
    plain = [{"role": m["role"], "content": m["content"]} for m in CHAT]
    assert len({prompt.uid, Prompt.make(CHAT).uid, Prompt.make(plain).uid}) == 3
    # Splits and given answers go by the messages, whatever tools there are.
    assert prompt.content_hash == Prompt.make(CHAT).content_hash != Prompt.make(plain).content_hash


def _with_nulls(message: dict[str, Any]) -> dict[str, Any]:
    keys = {key: None for other in CHAT for key in other}
    return {**keys, **message}


STORED = {
    "null keys, as parquet fills them in": [_with_nulls(message) for message in CHAT],
    "null content beside calls": [CHAT[0], {**CHAT[1], "content": None}, CHAT[2]],
    "text parts": [
        {**CHAT[0], "content": [{"type": "text", "text": "su", "image": None}, {"type": "text", "text": "m"}]},
        *CHAT[1:],
    ],
    "calls as text": [CHAT[0], {**CHAT[1], "tool_calls": json.dumps([CALL])}, CHAT[2]],
    "arguments as text": [
        CHAT[0],
        {**CHAT[1], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
        CHAT[2],
    ],
    "messages as text": json.dumps(CHAT),
}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "texts"])
@pytest.mark.parametrize("chat", [False, True])
def test_every_way_of_storing_a_chat_gives_the_same_prompt(tmp_path, stored, tools, chat):
    assert one(tmp_path, {"prompt": stored, "tools": tools}, chat=chat).uid == Prompt.make(CHAT, tools=[TOOL]).uid


def test_parquet_gives_the_prompts_of_json_lines(tmp_path):
    rows = [{"prompt": CHAT, "tools": [TOOL]}, {"prompt": [{"role": "user", "content": "hi"}], "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    settings = parse_settings(FileSettings, {"file": tmp_path / "prompts.parquet", "heldout": 0})
    found = {prompt.uid for prompt in build_prompts(settings, seed=0).prompts("train", 2)}
    assert found == {Prompt.make(CHAT, tools=[TOOL]).uid, Prompt.make([{"role": "user", "content": "hi"}]).uid}


def test_a_text_that_is_a_json_list_of_something_else_stays_text(tmp_path):
    for text in ("[1, 2]", '[{"a": 1}]', "[sic]"):
        assert one(tmp_path, {"prompt": text}).text == text


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"prompt": CHAT, "tools": "hammer"}, {}, "prompts.tools_column"),
        ({"prompt": CHAT, "tools": ["hammer"]}, {}, "prompts.tools_column"),
        ({"prompt": "sum", "tools": [TOOL]}, {}, "chat: true"),
        ({"prompt": [{"role": "user", "content": None}]}, {}, "'content'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, {}, "parts that are texts"),
        ({"prompt": [CHAT[0], {**CHAT[1], "tool_calls": "add"}, CHAT[2]]}, {}, "tool_calls 'add'"),
        ({"prompt": [{"role": "user", "content": "a", "name": "\ud800"}]}, {}, "surrogate"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, row, settings, said):
    with pytest.raises(DataError, match=said):
        one(tmp_path, row, **settings)


def test_a_column_of_another_meaning_can_be_left_alone(tmp_path):
    assert one(tmp_path, {"prompt": CHAT, "tools": "hammer"}, tools_column=None).tools == ()
    # The environment of a row reads its columns itself.
    row = {"prompt": "sum", "tools": "hammer", "environment": {"name": "python"}}
    assert one(tmp_path, row).extra["tools"] == "hammer"

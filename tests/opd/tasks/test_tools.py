"""Tool calls: what counts as one, and the sentence for what was meant as one."""

import pytest

from opd.tasks.tools import BadCall, Call, parse_reply

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_call_is_found_in_the_format_of_each_family() -> None:
    want = (Call("add", {"a": 1}),)
    assert parse_reply(HERMES).calls == want
    assert parse_reply('{"name": "add", "parameters": {"a": 1}}').calls == want
    assert parse_reply('<|python_tag|>{"name": "add", "parameters": {"a": 1}}').calls == want
    xml = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert parse_reply(xml).calls == (Call("add", {"a": "1"}, coerced=True),)
    two = "<tool_call><function=add><parameter=a>\n1\n\n</parameter>\n<parameter=b></parameter></function></tool_call>"
    assert parse_reply(two).calls == (Call("add", {"a": "1\n", "b": ""}, coerced=True),)


def test_parameters_that_are_opened_and_never_closed_take_no_longer_than_others() -> None:
    unclosed = "<parameter=a>" * 200_000  # by pairs of tags this takes hours
    (call,) = parse_reply(f"<tool_call><function=add>{unclosed}</function></tool_call>").calls
    assert call == Call("add", {}, coerced=True)


def test_arguments_may_be_absent_or_written_as_a_text() -> None:
    assert parse_reply('<tool_call>{"name": "look"}</tool_call>').calls == (Call("look", {}),)
    assert parse_reply('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>').calls == (
        Call("f", {"a": 1}),
    )


def test_text_around_calls_is_content_and_all_calls_count() -> None:
    found = parse_reply(f"First.\n{HERMES}\nThen.\n{HERMES}\nLast.")
    assert found.calls == (Call("add", {"a": 1}),) * 2
    assert found.content.split() == ["First.", "Then.", "Last."]
    two = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    assert parse_reply(two).calls == (Call("a", {}), Call("b", {}))


def test_calls_inside_closed_thinking_do_not_count() -> None:
    assert parse_reply(f"<think>\n{HERMES}\n</think>\n\nDone.").calls == ()
    assert parse_reply(f"<think>\nHm.\n</think>\n\n{HERMES}").calls == (Call("add", {"a": 1}),)


@pytest.mark.parametrize("text", ["", "The answer is 4.", '{"name": "Bob", "age": 3}', "{1, 2}", "x < y"])
def test_an_answer_is_no_call(text: str) -> None:
    assert parse_reply(text).calls == () and parse_reply(text).content == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments"', "</tool_call> is missing"),
        ('<tool_call>{"name": "a", "arguments": {}}<tool_call>', "</tool_call> is missing"),
        ("<tool_call>[1]</tool_call>", "list and not an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "list and not an object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments of add are not valid JSON"),
        ("<tool_call><function=add><parameter=a>1</tool_call>", "</function> is missing"),
        ('{"name": "add", "parameters": {"a": ', "not valid JSON"),
        ("<tool_call>" + "[" * 50_000 + "</tool_call>", "not valid JSON"),
        ('{"name": "add", "parameters": ' + "[" * 50_000, "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": "' + "[" * 50_000 + '"}</tool_call>', "arguments of add are not"),
    ],
)
def test_what_was_meant_as_a_call_gets_a_sentence(text: str, reason: str) -> None:
    first = parse_reply(text).calls[0]
    assert isinstance(first, BadCall) and reason in first.reason

"""What a chat template leaves out of a prompt is refused or said, whatever it is."""

import logging
from typing import Any

import pytest

from opd.errors import DataError
from opd.tasks.encode import encode_prompt, encode_prompts
from opd.tasks.prompt import Prompt
from opd.tasks.template import TemplateWatch, rendered
from opd.tasks.turns import Answered, encode_turns
from opd_lab.tiny.tokenizer import make_tokenizer
from tests.opd.tasks.test_messages import CALL, CHAT, TOOL
from tests.support.chat_templates import FAMILIES, family_tokenizer

USER = {"role": "user", "content": "Say 3"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"


def tokenizer_of(body: str, end: str = "{% if add_generation_prompt %}[assistant]{% endif %}") -> Any:
    """A tokenizer whose template writes `body` for each message m."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]" + body + "{% endfor %}" + end
    return tokenizer


def said(caplog: pytest.LogCaptureFixture, prompt: Prompt, tokenizer: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "opd.tasks.template"):
        watch = TemplateWatch(tokenizer)
        for _ in range(2):
            encode_prompts([prompt], tokenizer, watch=watch)
    return [record.args[1] for record in caplog.records]  # type: ignore[index, misc]


def test_a_template_over_parts_gets_parts():
    text = rendered(Prompt.make([SYSTEM, USER]), tokenizer_of(PARTS))
    assert text == "[system]Be brief.[user]Say 3[assistant]"
    only_user = "{% if m['role'] == 'user' %}" + PARTS + "{% else %}{{ m['content'] + '!' }}{% endif %}"
    assert rendered(Prompt.make([SYSTEM, USER]), tokenizer_of(only_user)) == "[system]Be brief.![user]Say 3[assistant]"


def test_an_episode_under_a_template_over_parts_gets_its_observations():
    tokenizer = tokenizer_of(PARTS)
    (ids,) = encode_turns([Answered("seen", Prompt.make([USER]), [5])], tokenizer, frozenset())
    assert tokenizer.decode(ids) == "[user]seen[assistant]"


@pytest.mark.parametrize(
    ("body", "messages", "tools", "lost"),
    [
        (
            "{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}",
            [SYSTEM, USER],
            [],
            "the content of role 'system'",
        ),
        ("{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}{{ m.tool_calls }}", CHAT, [], "role 'tool'"),
        ("{{ m['text'] }}", [USER], [], "role 'user'"),
        (
            "{% if loop.last %}{{ m['content'] }}{% endif %}",
            [USER, {"role": "assistant", "content": "4"}, USER],
            [],
            "'user' and",
        ),
        ("{{ m['content'][:3] }}", [USER], [], "role 'user'"),
        ("{{ m['content'] }}", CHAT, [], "tool_calls"),
        ("{{ m['content'] }}", [USER], [TOOL], "tools"),
    ],
)
def test_what_is_lost_is_refused_by_name(body, messages, tools, lost):
    with pytest.raises(DataError, match=f"leaves out .*{lost}"):
        encode_prompt(Prompt.make(messages, tools=tools), tokenizer_of(body))


CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"


@pytest.mark.parametrize(
    ("body", "end", "remark"),
    [
        ("{{ m['content'] | trim }}" + CALLS, None, "removes the white space around content of role 'user'"),
        ("{{ m['content'] | lower }}" + CALLS, None, "changes content of role 'user'"),
        ("{{ m['content'] }}" + CALLS, None, "leaves out the arguments of tool_calls"),
        ("{{ m['content'] }}" + CALLS, None, "leaves out reasoning_content of role 'assistant'"),
        ("{{ m['content'] }}" + CALLS, None, "leaves out name of role 'user'"),
        ("{{ m['content'] }}{{ m.name }}" + CALLS, "", "does not open the assistant's turn"),
        ("{{ m['content'] }}" + CALLS, "{{ strftime_now('%d %B %Y') }}[assistant]", "writes today's date"),
    ],
)
def test_what_a_template_changes_is_said_once(caplog, body, end, remark):
    prompt = Prompt.make([{**USER, "content": "Say 3\n", "name": "Ann"}, *CHAT[1:]])
    tokenizer = tokenizer_of(body) if end is None else tokenizer_of(body, end)
    assert [one for one in said(caplog, prompt, tokenizer) if one.startswith(remark)] != []
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_templates_lose_nothing_of_a_chat(caplog, name):
    tokenizer = family_tokenizer(FAMILIES[name])
    chat = [USER, {"role": "assistant", "content": "3"}, {**USER, "content": "Say 4"}]
    assert said(caplog, Prompt.make(chat), tokenizer) == []


def test_a_result_that_follows_its_call_needs_no_id_or_name(caplog):
    bare = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, CHAT[2]]
    body = "{{ m['content'] }}{{ m.tool_calls }}{% if loop.first %}{{ tools }}{% endif %}"
    assert said(caplog, Prompt.make(bare, tools=[TOOL]), tokenizer_of(body)) == []


def test_a_text_that_a_template_drops_beside_calls_is_said(caplog):
    """As the templates of Llama 3.1 and Mistral do."""
    chat = [CHAT[0], {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}, CHAT[2]]
    body = "{% if m.tool_calls %}{{ m.tool_calls }}{% else %}{{ m['content'] }}{% endif %}"
    remarks = said(caplog, Prompt.make(chat), tokenizer_of(body))
    assert any("the content of role 'assistant' beside its tool_calls" in remark for remark in remarks), remarks


def test_an_opening_that_a_template_does_not_need_is_not_missed(caplog):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert said(caplog, Prompt.make([USER]), tokenizer) == []


def test_calls_get_the_form_that_the_template_reads():
    # As DeepSeek's: calls only where content is none, arguments joined as text.
    body = (
        "{% if m.tool_calls and m['content'] is none %}"
        "{% for c in m.tool_calls %}{{ '<' + c.function.name + c.function.arguments + '>' }}{% endfor %}"
        "{% else %}{{ m['content'] }}{% endif %}"
    )
    text = rendered(Prompt.make(CHAT), tokenizer_of(body))
    assert text == '[user]sum[assistant]<add{"a": 1, "b": 2}>[tool]3[assistant]'
    objects = body.replace("is none", "== ''").replace("c.function.arguments", "(c.function.arguments | tojson)")
    assert rendered(Prompt.make(CHAT), tokenizer_of(objects)) == text
    printed = body.replace("is none", "== ''").replace("+ c.function.arguments +", "~ c.function.arguments ~")
    assert rendered(Prompt.make(CHAT), tokenizer_of(printed)) == text
    assert CALL["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}

"""Contexts that are made from the outcomes of a row and of its group."""

import threading
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from student.data.row import Row
from student.scoring.contexts import Context, Contexts, facts_of
from student.settings.contexts import ContextSettings


class Letters:
    """A tokenizer of bytes."""

    chat_template = None

    def __call__(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
        return {"input_ids": list(text.encode()) if isinstance(text, str) else [list(one.encode()) for one in text]}


def row(sample: int, text: str, reward: float | None, reason: str = "") -> Row:
    verdict = Verdict.unknown(reason) if reward is None else Verdict.score(reward)
    verdict = Verdict(verdict.status, verdict.value, reason)
    question = np.array(list(b"q?"), np.uint32)
    return make_row(list(text.encode()), prompt="q?", sample=sample, prompt_ids=question, text=text, verdict=verdict)


GROUP = [row(0, "a", 0.2, "too short"), row(1, "bb", 1.0), row(2, "ccc", 1.0), row(3, "dd", None), row(4, "e", 0.0)]


def contexts(**settings: Any) -> Contexts:
    return Contexts({"ema": parse_settings(ContextSettings, settings)}, Letters(), 32)


def read(made: Contexts, rows: list[Row]) -> list[str | None]:
    made.fill_late(rows, lambda row: GROUP)
    found = [row.contexts.get("ema") for row in rows]
    return [None if ids is None else bytes(ids.astype(np.uint8)).decode() for ids in found]


def test_the_best_and_the_worst_answers_are_those_of_others_and_ties_go_to_the_first() -> None:
    found = [facts_of(row, GROUP, 1.0)["group"] for row in GROUP]
    assert [(facts["best"], facts["worst"]) for facts in found] == [
        ("bb", "e"),
        ("ccc", "e"),
        ("bb", "e"),
        ("bb", "e"),
        ("bb", "a"),
    ]
    assert {facts["mean_reward"] for facts in found} == {0.55}
    assert facts_of(GROUP[1], GROUP[:2], 1.0)["group"]["best"] == ""
    assert facts_of(GROUP[0], GROUP[::-1], 1.0)["group"]["best"] == "bb"
    assert facts_of(GROUP[0], GROUP, 2.0)["group"] == {"best": "", "worst": "e", "mean_reward": 0.55}


def test_a_row_tells_its_answer_reward_verdict_and_feedback() -> None:
    assert facts_of(GROUP[0], GROUP, 1.0)["row"] == {
        "response": "a",
        "reward": 0.2,
        "correct": False,
        "feedback": "too short",
        "truncated": False,
    }
    unknown = facts_of(GROUP[3], GROUP, 1.0)["row"]
    assert unknown["reward"] is None and unknown["correct"] is None and unknown["feedback"] == ""


def test_a_template_asks_for_what_there_is() -> None:
    made = contexts(prompt="{{ prompt }}{% if group.best %} Right: {{ group.best }}.{% endif %} {{ row.feedback }}")
    assert made.late == {"ema"}
    assert read(made, GROUP[:2]) == ["q? Right: bb. too short", "q? Right: ccc. "]


def test_a_row_with_nothing_to_tell_or_too_much_has_no_context() -> None:
    made = contexts(prompt="{{ row.feedback }}{{ prompt }}", skip_without=["row.feedback"])
    assert read(made, GROUP[:2]) == ["too shortq?", None]
    assert read(contexts(prompt="{{ row.response * 20 }}"), GROUP[1:3]) == [None, None]


def test_a_context_of_columns_alone_is_made_before_anything_is_judged() -> None:
    made, one = contexts(prompt="{{ prompt }}!"), row(0, "a", None)
    made.fill(one)
    assert not made.late and bytes(one.contexts["ema"].astype(np.uint8)) == b"q?!"


@pytest.mark.parametrize("name", ["group.best", "row.feedback"])
def test_an_answer_is_text_and_never_a_template(name: str) -> None:
    hostile = row(1, "{{ 7 * 7 }}", 1.0, "{{ 7 * 7 }}")
    made = contexts(prompt=f"{{{{ {name} }}}}")
    one = row(0, "a", 0.0, "{{ 7 * 7 }}")
    made.fill_late([one], lambda row: [one, hostile])
    assert bytes(one.contexts["ema"].astype(np.uint8)) == b"{{ 7 * 7 }}"


def test_two_threads_never_use_a_tokenizer_at_once_and_it_is_not_the_loop_s() -> None:
    """A fast tokenizer that is used by two threads fails with "Already borrowed"."""
    tellers: list[threading.Thread] = []

    class Asking(Letters):
        """Has a second thread encode while it is encoding, and sees whether that has to wait."""

        def __call__(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
            assert self is not given
            if not tellers:
                tellers.append(threading.Thread(target=made.encode, args=("ema", Prompt.make("another?"))))
                tellers[0].start()
                tellers[0].join(0.2)
                assert tellers[0].is_alive()
            return super().__call__(text)

    given = Asking()
    made = Contexts({"ema": parse_settings(ContextSettings, {"prompt": "{{ prompt }}!"})}, given, 32)
    assert bytes(made.encode("ema", Prompt.make("one?")).astype(np.uint8)) == b"one?!"
    tellers[0].join(60)
    assert not tellers[0].is_alive()


def test_example_turns_stand_between_the_system_message_and_the_chat() -> None:
    turns = [{"role": "user", "content": "Like {{ domain }}?"}, {"role": "assistant", "content": "Yes."}]
    chat = [{"role": "system", "content": "Old."}, {"role": "user", "content": "q?"}]
    prompt = Prompt.make(chat, domain="maths")
    said = [("user", "Like maths?"), ("assistant", "Yes."), ("user", "q?")]
    for settings, first in (({}, "Old."), ({"system": "New."}, "New.")):
        context = Context("teacher", parse_settings(ContextSettings, {"turns": turns, **settings}))
        messages = [(message["role"], message["content"]) for message in context.render(prompt).messages or ()]
        assert messages == [("system", first), *said]
    bare = context.render(Prompt.make(chat[1:], domain="maths")).messages or ()
    assert [message["content"] for message in bare][1:] == [content for _, content in said]
    with pytest.raises(DataError, match=r"contexts\.teacher\.turns .* prompts\.chat"):
        Context("teacher", parse_settings(ContextSettings, {"turns": turns})).render(Prompt.make("q?", domain="m"))
    with pytest.raises(ConfigError, match=r"contexts\.teacher\.turns\.0\.content"):
        Context("teacher", parse_settings(ContextSettings, {"turns": [{"role": "user", "content": "{{ x"}]}))
    assert Context(
        "t", parse_settings(ContextSettings, {"turns": [{**turns[0], "content": "{{ row.reward }}"}]})
    ).reads_outcomes

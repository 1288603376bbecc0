"""Classes in the shape of TRL's environment_factory, unchanged: reset, public methods as tools, get_reward."""

import json
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.environments.factory import Factory, FactoryOptions
from opd.tasks.environments.service import make_environment
from opd.tasks.prompt import Prompt

HERE = "tests.opd.tasks.environments.test_factory"


class Counter:
    """A counter that is to reach the prompt's answer."""

    def reset(self, answer: str, **row: Any) -> str:
        self.total, self.goal = 0, int(answer)
        return f"Reach {self.goal}; {row['hint']}."

    def add(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: How much.
        """
        self.total += by
        return f"total {self.total}"

    async def double(self) -> int:
        """Double the counter."""
        self.total *= 2
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.goal)


class Plain(Counter):
    """Has a method that cannot be described."""

    def helper(self, value):  # type: ignore[no-untyped-def]
        return value


class Empty:
    """Has no tools."""

    def reset(self) -> None: ...


PROMPT = Prompt.make("Count.", answer="6", extra={"hint": "start at 0"})


@pytest.fixture
def counter() -> Factory:
    return Factory(parse_settings(FactoryOptions, {"factory": f"{HERE}:Counter"}))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_methods_are_tools_with_their_schemas_and_columns_reach_reset(counter: Factory) -> None:
    seen = counter.reset(PROMPT, 0)
    assert seen.text == "Reach 6; start at 0." and not seen.done
    assert [tool["function"]["name"] for tool in seen.tools] == ["add", "double"]
    assert seen.tools[0]["function"]["parameters"]["properties"]["by"]["type"] == "integer"


def test_calls_are_carried_out_in_order_and_a_reply_without_one_ends_the_episode(counter: Factory) -> None:
    counter.reset(PROMPT, 0)
    seen = counter.step(f"I count.\n{call('add', by=3)}\n{call('double')}")
    assert seen.results == ("total 3", "6") and not seen.done and seen.reward is None
    end = counter.step("It is six.")
    assert end.done and end.reward == 1.0
    assert counter.reset(PROMPT, 1).text and counter.step("No.").reward == 0.0  # used again, from the start


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (call("subtract", by=1), "there is no tool 'subtract'; there are add, double"),
        (call("add"), "TypeError: "),
        (call("add", by="x"), "TypeError: "),
        ("<tool_call>{</tool_call>", "not valid JSON"),
    ],
)
def test_what_goes_wrong_is_told_to_the_student(counter: Factory, action: str, error: str) -> None:
    counter.reset(PROMPT, 0)
    (result,) = counter.step(action).results
    assert error in json.loads(result)["error"]


def test_arguments_of_xml_calls_get_the_types_of_the_schema(counter: Factory) -> None:
    counter.reset(PROMPT, 0)
    xml = "<tool_call>\n<function=add>\n<parameter=by>\n3\n</parameter>\n</function>\n</tool_call>"
    assert counter.step(xml).results == ("total 3",)


@pytest.mark.parametrize(
    ("name", "message"), [("Plain", "tool helper of environment"), ("Empty", "there is no tool to call")]
)
def test_a_class_that_cannot_serve_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment({"name": "factory", "options": {"factory": f"{HERE}:{name}"}})


def test_python_runs_and_the_answer_is_judged() -> None:
    python = make_environment({"name": "python"})
    seen = python.reset(Prompt.make("6 * 7?", answer="42"), 0)
    assert [tool["function"]["name"] for tool in seen.tools] == ["python"]
    assert python.step(call("python", code="print(6 * 7)")).results == ("42",)
    (failed,) = python.step(call("python", code="print('so far')\n1 / 0")).results
    assert failed.startswith("so far") and "ZeroDivisionError" in failed
    assert python.step(call("python", code="x = 1")).results == ("(no output)",)
    end = python.step("The answer is 42.")
    assert (end.done, end.reward, end.success) == (True, 1.0, True)
    python.reset(Prompt.make("Who knows?"), 0)
    assert python.step("42").reward is None
    python.close()

"""Compositions with links from a chat model: what the first answer is called, and where the second problem uses it.

The model is asked once for the link and once more, in a new conversation, to read both numbers back from what it wrote.
If the two disagree, or the number does not occur in the problem, the pair gives no composition.
"""

from random import Random
from typing import Any

from opd.tasks.chat import ChatClient, ChatFailed, object_in
from opd_zoo.compose.compose import Link, Linker, PairRefused, Problem, lone_numbers, number

_ASK = """Two problems:

PROBLEM 1: {first}
Its answer is {answer}.

PROBLEM 2: {second}

Write one sentence that names the quantity which PROBLEM 1 asks for, with {{first}} as its symbol, without saying its
value. Choose a number of PROBLEM 2 that occurs there once. Answer with JSON alone:
{{"definition": "Let {{first}} be ...", "number": "..."}}"""
_CHECK = """PROBLEM: {first}
{definition}
TEXT: {second}

The symbol of the sentence stands for a number. Which is it, and does {chosen} stand in TEXT exactly once? Answer with
JSON alone: {{"value": "...", "once": true}}"""


class ByChat(Linker):
    """Finds links by asking a chat model.

    Args:
        client: a client of the model.
    """

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    def __call__(self, first: Problem, second: Problem, random: Random) -> Link:
        said = self._ask(_ASK.format(first=first.text, answer=first.answer, second=second.text))
        definition, chosen = str(said.get("definition", "")), number(said.get("number"))
        if definition.count("{first}") != 1:
            raise PairRefused("the model named no symbol")
        places = {number(second.text[start:end]): (start, end) for start, end in lone_numbers(second.text)}
        if chosen is None or chosen not in places:
            raise PairRefused("the model chose a number that does not occur exactly once in the problem")
        shown = definition.replace("{first}", "X")
        again = self._ask(_CHECK.format(first=first.text, definition=shown, second=second.text, chosen=chosen))
        if number(again.get("value")) != number(first.answer) or again.get("once") is not True:
            raise PairRefused("the model read the numbers back differently")
        return Link(definition, places[chosen])

    def _ask(self, text: str) -> dict[str, Any]:
        try:
            found = object_in(self._client.ask([{"role": "user", "content": text}]))
        except ChatFailed as error:
            raise PairRefused("the model gave no answer") from error
        if found is None:
            raise PairRefused("the model's answer cannot be parsed")
        return found

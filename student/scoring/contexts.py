"""Contexts: prompts that scoring models read in place of the student's, with hints, solutions or system prompts.

A context is a template over the columns of a prompt, and over the outcome of the row and of its group:

    row.response        the response itself, as text
    row.reward          its reward; none if unknown
    row.correct         whether the verifier judged it correct; none if it could not tell
    row.feedback        what the verifier or the environment said about it
    row.truncated       whether the length limit cut it
    group.best          the best other answer to the prompt, among those with a reward of at least `success`
    group.worst         the worst other answer, among those with a lower reward
    group.mean_reward   mean reward of the group; none if no reward is known

Missing texts are empty, so that a template can test {% if group.best %}. A context that reads any of these is rendered
once the row has been judged together with its whole group, and only then is the model asked; if it reads only columns,
the model is asked as soon as the row ends. Contexts change what a model reads before the response but not the response
itself, so signals stay aligned with the student's tokens. Their ids never enter the student's input.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, DataError
from opd.tasks.encode import encode_prompts
from opd.tasks.prompt import Prompt
from opd.tasks.template import TemplateWatch
from opd.tasks.verdict import VerdictStatus
from student.data.needs import TEACHER
from student.data.outcome import reward_of
from student.settings.contexts import ContextSettings

if TYPE_CHECKING:
    from jinja2 import Template

    from student.data.row import Row

_CACHED = 4096


class Context:
    """The template of one context.

    Args:
        role: the role or model that reads it, for messages.
        settings: the template.

    Raises:
        ConfigError: if a text is not a valid template.
    """

    def __init__(self, role: str, settings: ContextSettings) -> None:
        self._role = role
        self._system = _template(settings.system, f"contexts.{role}.system")
        self._prompt = _template(settings.prompt, f"contexts.{role}.prompt")
        self._turns = [
            (turn.role, said)
            for at, turn in enumerate(settings.turns)
            if (said := _template(turn.content, f"contexts.{role}.turns.{at}.content")) is not None
        ]
        self._options = settings.template_options
        self._read = set().union(*map(_names, settings.texts))

    @property
    def reads_outcomes(self) -> bool:
        """Whether it can only be rendered once the row has been judged."""
        return bool(self._read & {"row", "group"})

    def render(self, prompt: Prompt, facts: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt that the role reads in place of `prompt`; `facts` come from `facts_of`.

        Raises:
            DataError: if a template names a column that the prompt lacks, or sets messages for a plain text.
        """
        columns = {**_columns(prompt), **(facts or {})}
        text = None if self._prompt is None else self._filled(self._prompt, columns, prompt)
        system = None if self._system is None else self._filled(self._system, columns, prompt)
        turns = [{"role": role, "content": self._filled(said, columns, prompt)} for role, said in self._turns]
        if prompt.messages is None:
            if system is not None or turns:
                key = "turns" if system is None else "system"
                raise DataError(
                    f"contexts.{self._role}.{key} is for chats, but {prompt.name} is plain text; put the text into "
                    f"contexts.{self._role}.prompt, or set prompts.chat."
                )
            return Prompt.make(text or "", place=prompt.place)
        messages = [dict(message) for message in prompt.messages]
        if text is not None:
            messages[_last_user(messages)]["content"] = text
        if system is not None:
            # Chat templates allow one system message, as the first message.
            messages = [m for i, m in enumerate(messages) if i or m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": system})
        begin = int(bool(messages) and messages[0]["role"] == "system")
        messages[begin:begin] = turns
        options = prompt.template_options if self._options is None else self._options
        return Prompt.make(messages, template_options=options, tools=prompt.tools, place=prompt.place)

    def _filled(self, template: "Template", columns: Mapping[str, Any], prompt: Prompt) -> str:
        from jinja2 import TemplateError

        try:
            return template.render(columns)
        except TemplateError as error:
            raise DataError(
                f"contexts.{self._role} cannot be filled in for {prompt.name}: {error}; its columns are "
                f"{', '.join(sorted(columns))} (prompts.keep_columns keeps more of a file's or dataset's)."
            ) from error


def reads_outcomes(role: str, settings: ContextSettings) -> bool:
    """Whether the context of `role` can only be rendered once a row has been judged.

    Raises:
        ConfigError: for a text that is not a valid template.
    """
    return Context(role, settings).reads_outcomes


def facts_of(row: "Row", group: Sequence["Row"], success: float) -> dict[str, dict[str, Any]]:
    """The facts that templates may read about a judged row (`row`) and all judged answers to its prompt (`group`)."""
    verdict = row.verdict if row.verdict is not None and row.verdict.known else None
    rewards = [(reward, other) for other in group if (reward := reward_of(other)) is not None]
    others = [(reward, other) for reward, other in rewards if other.key.rollout != row.key.rollout]
    # max and min keep the first of equals: sorted as planned, the choice does not depend on who finished first.
    others.sort(key=lambda one: (one[1].key.sample, one[1].key.turn))
    best = max((one for one in others if one[0] >= success), key=lambda one: one[0], default=None)
    worst = min((one for one in others if one[0] < success), key=lambda one: one[0], default=None)
    return {
        "row": {
            "response": row.text,
            "reward": reward_of(row),
            "correct": None if verdict is None else verdict.status is VerdictStatus.CORRECT,
            "feedback": "" if row.verdict is None else row.verdict.reason,
            "truncated": row.truncated,
        },
        "group": {
            "best": "" if best is None else best[1].text,
            "worst": "" if worst is None else worst[1].text,
            "mean_reward": sum(reward for reward, _ in rewards) / len(rewards) if rewards else None,
        },
    }


_EXAMPLE = {
    "row": {"response": "...", "reward": 0.0, "correct": False, "feedback": "...", "truncated": False},
    "group": {"best": "...", "worst": "...", "mean_reward": 0.5},
}
"""Placeholder for outcomes before there are any."""


class Contexts:
    """The contexts of a recipe as token ids.

    Args:
        settings: settings by role or model.
        tokenizer: the student's tokenizer, which the teachers share.
        limit: maximum tokens of a context whose settings have no limit.

    Attributes:
        late: roles whose contexts are rendered from outcomes.
    """

    def __init__(self, settings: Mapping[str, ContextSettings], tokenizer: Any, limit: int) -> None:
        self._settings = settings
        self._contexts = {role: (Context(role, one), one.max_tokens or limit) for role, one in settings.items()}
        self.late = frozenset(role for role, (context, _) in self._contexts.items() if context.reads_outcomes)
        # Rows that are sampled ahead get their contexts in another thread, and a fast tokenizer must not be used by two
        # threads at once. So this has a tokenizer of its own, used under a lock.
        self._tokenizer = copy.deepcopy(tokenizer) if settings else tokenizer
        self._lock = threading.Lock()
        self._watch = TemplateWatch(self._tokenizer)
        self._encoded: dict[str, NDArray[np.uint32]] = {}  # rows of a group share their prompt

    def __bool__(self) -> bool:
        return bool(self._contexts)

    def fill(self, row: "Row") -> None:
        """Give a row the ids that each role reads in place of its prompt, for contexts that need no outcome.

        Raises:
            DataError: if a context cannot be rendered or is too long.
        """
        for role in self._contexts.keys() - self.late:
            row.contexts[role] = self.encode(role, row.prompt)

    def fill_late(self, rows: Sequence["Row"], group: Callable[["Row"], Sequence["Row"]]) -> None:
        """Give judged rows the contexts that need outcomes; a row for which a context would be empty gets none.

        Args:
            rows: judged rows.
            group: returns all judged rows of a row's group.

        Raises:
            DataError: if a context cannot be rendered.
        """
        for row in rows:
            for role in sorted(self.late):
                context, limit = self._contexts[role]
                settings = self._settings[role]
                facts = facts_of(row, group(row), settings.success)
                required = [
                    facts[kind][name] for kind, _, name in (part.partition(".") for part in settings.skip_without)
                ]
                # A row that is scored again still has its first context, made from other outcomes.
                row.contexts.pop(role, None)
                if required and not any(required):
                    continue
                ids = self._encode(context.render(row.prompt, facts))
                if len(ids) <= limit:
                    row.contexts[role] = ids

    def read_by(self, teacher: str, prompt: Prompt) -> Prompt:
        """What a teacher reads in place of `prompt`, as a prompt: for teachers that encode it themselves.

        Raises:
            DataError: if its context cannot be rendered.
        """
        role = teacher if teacher in self._contexts else TEACHER
        return self._contexts[role][0].render(prompt) if role in self._contexts else prompt

    def encode(self, role: str, prompt: Prompt) -> NDArray[np.uint32]:
        """[P'] uint32, the context of `role` for `prompt`, with an example in place of outcomes.

        Raises:
            DataError: if it cannot be rendered or is too long.
        """
        context, limit = self._contexts[role]
        rendered = context.render(prompt, _EXAMPLE if role in self.late else None)
        ids = self._encoded.get(rendered.uid)
        if ids is None:
            ids = self._encode(rendered)
            ids.setflags(write=False)
            if len(self._encoded) >= _CACHED:
                self._encoded.clear()
            self._encoded[rendered.uid] = ids
        if len(ids) > limit:
            raise DataError(
                f"the context of {role} for {prompt.name} has {len(ids)} tokens, over the limit of {limit}; "
                f"raise contexts.{role}.max_tokens."
            )
        return ids

    def _encode(self, prompt: Prompt) -> NDArray[np.uint32]:
        with self._lock:
            return np.array(encode_prompts([prompt], self._tokenizer, watch=self._watch)[0], dtype=np.uint32)


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What templates may name; a column without a value counts as missing."""
    text = prompt.text
    if prompt.messages is not None:
        text = prompt.messages[_last_user(prompt.messages)]["content"]
    own = {"prompt": text, "answer": prompt.answer, "domain": prompt.domain}
    return {name: value for name, value in {**prompt.extra, **own}.items() if value is not None}


def _last_user(messages: Any) -> int:
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else len(messages) - 1


def _names(text: str) -> set[str]:
    """The names that a valid template reads."""
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return meta.find_undeclared_variables(ImmutableSandboxedEnvironment().parse(text))


def _template(text: str | None, where: str) -> "Template | None":
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if text is None:
        return None
    try:
        return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)
    except TemplateError as error:
        raise ConfigError(f"{where} is not a valid Jinja template: {error}.") from error

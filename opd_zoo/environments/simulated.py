"""A simulated world: a chat model plays task writer, user, tools and judge for an assistant that calls tools.

    reset    writes a task, or takes it from the prompt if method `trustee` wrote one for the whole group; shows the
             instructions and the user's first message, and offers the tools
    step     calls go to the simulated tools; a reply without a call goes to the simulated user or, after the user's
             last turn or once the user is satisfied, to the judge: reward -1, 0 or 1, solved at 1

    {"task": "simulated", "options": {"simulator": {"endpoint": "http://host:8000/v1", "model": "m"},
     "tools": {"weather": [{"name": "forecast", "description": "...", "parameters": {"city": "string"}}]}}}

If a role does not answer in time, or not with the JSON that it was asked for, the episode is aborted: it ends as
broken, is not trained on and enters no mean. If that role is the judge, the episode stays unjudged instead. Calls that
do not parse, unknown tools and missing arguments are the student's mistakes and are answered with {"error": ...}.
Answers are stored by their question, see `opd.tasks.chat`; with `cache` a resumed run gets the same answers as before.
Source: TRUSTEE, arXiv 2604.17739 (from its text; the prompts are ours).
"""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from opd.config import Settings
from opd.tasks.chat import ChatClient, ChatSettings
from opd.tasks.environments.base import ENVIRONMENT, EnvironmentTask, Observation
from opd.tasks.prompt import Prompt
from opd.tasks.tools import BadCall, Call, parse_reply
from opd_zoo.environments.simulated_parts import judged, tool_returns, user_says
from opd_zoo.environments.simulated_task import ASPECTS, SimulatorFailed, bound, make_task

TASK, LEVELS, CASE, POOL = "simulated_task", "simulated_levels", "simulated_case", "simulated_pool"
"""Keys of `Prompt.extra`: the written task, or why there is none; its levels; its number; tools in the order drawn."""


class ToolSpec(Settings):
    """A tool that is simulated."""

    name: str = Field(min_length=1, description="Name of the tool.")
    description: str = Field("", description="What the tool does, as the student reads it.")
    parameters: dict[str, Literal["string", "number", "integer", "boolean", "array", "object"]] = Field(
        default_factory=dict, description="JSON type of each parameter by name; all parameters are required."
    )

    def schema_of(self) -> dict[str, Any]:
        """The tool's JSON schema, in the form that chat templates use."""
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.parameters.items()},
            "required": list(self.parameters),
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


class SimulatedOptions(Settings):
    """Who simulates what."""

    simulator: ChatSettings = Field(
        description="Chat model that writes tasks and plays the user and the tools: its endpoint and name."
    )
    judge: ChatSettings | None = Field(None, description="Chat model that judges episodes; null means the simulator.")
    tools: dict[str, list[ToolSpec]] = Field(
        min_length=1, description="Simulated tools by category; the tools of a task come from one category."
    )
    difficulty: int = Field(
        1, ge=1, le=100, description="Difficulty D of tasks, from 1 to 100, where no method sets it, as in evaluations."
    )
    chat: bool = Field(
        False, description="Make prompts chat messages, for students with a chat template, instead of plain text."
    )

    @field_validator("tools")
    @classmethod
    def _some(cls, tools: dict[str, list[ToolSpec]]) -> dict[str, list[ToolSpec]]:
        empty = [category for category, found in tools.items() if not found]
        if empty:
            raise ValueError(f"category {empty[0]!r} has no tools; name one or leave the category out")
        return tools


class Simulated(EnvironmentTask):
    """Tasks, user, tools and judge played by a chat model (TRUSTEE)."""

    Options: ClassVar[type[Settings]] = SimulatedOptions
    name = "simulated"

    def __init__(self, options: SimulatedOptions) -> None:
        super().__init__(options)
        self._simulator = ChatClient(options.simulator)
        self._judge = ChatClient(options.judge) if options.judge is not None else self._simulator

    def draw(self, random: Random) -> Prompt:
        """Draw a case: a category, and the order in which its tools are offered."""
        category = random.choice(sorted(self.options.tools))
        pool = list(self.options.tools[category])
        random.shuffle(pool)
        case = str(random.randrange(10**9))
        # The number makes cases distinct, because identity, groups and the held-out split depend on the prompt's text.
        text = f"Case {case}, {category}.\n"
        place = {"name": self.name, "options": self.options.model_dump(mode="json")}
        extra = {ENVIRONMENT: place, CASE: case, POOL: [tool.schema_of() for tool in pool]}
        content: Any = [{"role": "user", "content": text}] if self.options.chat else text
        return Prompt.make(content, domain=self.name, extra=extra)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Show the task.

        Raises:
            SimulatorFailed: if there is none.
        """
        extra = prompt.extra
        self._before = self._asked
        self._levels: Mapping[str, int] = extra.get(LEVELS) or {a: bound(a, self.options.difficulty) for a in ASPECTS}
        self._tools: list[Mapping[str, Any]] = offered(extra, self._levels)
        task = extra.get(TASK)
        if isinstance(task, str):
            raise SimulatorFailed(task)
        self._task: Mapping[str, Any] = task or make_task(self._simulator, extra[CASE], self._tools, self._levels)
        self._said = 1
        self._told = [f"User: {self._task['query']}"]
        return self._shown(f"{self._task['instructions']}\nUser: {self._task['query']}\n", tools=tuple(self._tools))

    def step(self, action: str) -> Observation:
        """Carry out the tool calls in a reply; a reply without calls goes to the user, or ends the episode.

        Raises:
            SimulatorFailed: if a simulated role fails; a failure of the judge leaves the episode unjudged instead.
        """
        reply = parse_reply(action)
        if reply.calls:
            self._told.append(f"Assistant: {action}")
            results = tuple(self._call(call) for call in reply.calls)
            bad = sum(isinstance(call, BadCall) for call in reply.calls)
            return self._shown("", results=results, info={"bad_calls": bad})
        self._told.append(f"Assistant: {reply.content}")
        if self._said < self._levels["turns"]:
            message, done = user_says(self._simulator, self._task, self._told)
            if not done:
                self._said += 1
                self._told.append(f"User: {message}")
                return self._shown(f"User: {message}\n")
        try:
            value = judged(self._judge, self._task, self._levels["strictness"], self._told)
        except SimulatorFailed as error:
            return self._shown("", done=True, info={"unknown": str(error)})
        return self._shown("", reward=float(value), done=True, success=value == 1)

    def _call(self, call: Call | BadCall) -> str:
        """The result of a call."""
        if isinstance(call, BadCall):
            return json.dumps({"error": call.reason})
        known = {tool["function"]["name"]: tool for tool in self._tools}
        tool = known.get(call.name)
        if tool is None:
            return json.dumps({"error": f"there is no tool {call.name!r}; there are {', '.join(known)}"})
        missing = [name for name in tool["function"]["parameters"]["required"] if name not in call.arguments]
        if missing:
            return json.dumps({"error": f"{call.name} needs {', '.join(missing)}"})
        result = tool_returns(self._simulator, tool, call, self._task, self._told)
        self._told.append(f"Tool {call.name}: {result}")
        return result

    @property
    def _asked(self) -> int:
        """How many questions the models have been asked, all episodes together."""
        clients = {id(client): client for client in (self._simulator, self._judge)}.values()
        return sum(client.asked for client in clients)

    def _shown(self, text: str, *, info: Mapping[str, Any] | None = None, **more: Any) -> Observation:
        """An observation that also counts the questions to the models since the last one."""
        # Not the calls: how many questions the cache answers depends on interruptions and on which threads asked first.
        now = self._asked
        measures = {"simulator_questions": now - self._before}
        self._before = now
        return Observation(text, info={**(info or {}), "measures": measures}, **more)


def offered(extra: Mapping[str, Any], levels: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """The tools of a prompt at its levels: the first `levels["tools"]` of those drawn."""
    pool: Sequence[Mapping[str, Any]] = extra[POOL]
    return list(pool[: levels["tools"]])

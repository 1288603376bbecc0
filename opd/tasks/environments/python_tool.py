"""Problems with a Python interpreter: the student may call the tool `python`, then answers.

The answer is the first reply without a call; a verifier judges it against the prompt's reference. Each call runs as a
separate program in `opd.procs.sandbox`.
"""

from typing import Any, ClassVar

from pydantic import Field

from opd.config import Settings
from opd.procs.sandbox import Ended, Limits, check_machine, run_python
from opd.tasks.environments.base import Observation
from opd.tasks.environments.factory import Factory
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt


class PythonOptions(Settings):
    """Settings of the tool."""

    verifier: str = Field("numeric", description="Verifier that judges the answer, given like prompts.verifier.")
    verifier_timeout: float = Field(
        10.0, gt=0, description="Seconds that the check of an answer may take; after that its verdict is unknown."
    )
    seconds: float = Field(5.0, gt=0, description="Seconds that one program may run.")
    memory_mib: int = Field(512, ge=64, description="Maximum address space of one program in MiB.")
    output_characters: int = Field(
        4096,
        ge=1,
        description="Maximum characters of a program's output that the student reads; of longer output it reads the "
        "end.",
    )


class _Interpreter:
    """The tool."""

    def __init__(self, options: PythonOptions) -> None:
        self._options = options
        self._limits = Limits(seconds=options.seconds, memory_mib=options.memory_mib)

    def reset(self, **row: Any) -> None:
        """Nothing is kept from call to call."""

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints. Nothing is kept from one call to the next.

        Args:
            code: The program.
        """
        ran = run_python(code, limits=self._limits)
        said = [ran.output.strip(), ran.errors.strip(), "" if ran.ended is Ended.PASSED else f"Error: {ran.reason}"]
        text = "\n".join(part for part in said if part) or "(no output)"
        return text[-self._options.output_characters :]


class PythonTool(Factory):
    """A problem with a Python interpreter as a tool.

    Raises:
        ConfigError: if the machine cannot run the sandbox.
    """

    Options: ClassVar[type[Settings]] = PythonOptions

    def __init__(self, options: PythonOptions) -> None:
        check_machine()
        self._name = "python"
        self._verifier = load_verifier(options.verifier, options.verifier_timeout)
        self._start(_Interpreter(options))

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._prompt = prompt
        return super().reset(prompt, seed)

    def answered(self, content: str) -> Observation:
        """Verify the answer; an unknown verdict ends the episode without a reward."""
        verdict = self._verifier.verify(self._prompt, content)
        if not verdict.known:
            return Observation("", done=True, info={"unknown": verdict.reason})
        return Observation("", reward=verdict.value, done=True, success=verdict.value >= 1.0)

    def close(self) -> None:
        """Stop the verifier's processes."""
        self._verifier.close()

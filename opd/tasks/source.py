"""The one interface of all prompt sources, and the function that builds one from settings.

A source is an indexable stream: the i-th training prompt depends on the settings, the seed and i alone, so a run
resumes by remembering one number. Held-out prompts never occur in training, by construction.
"""

from typing import Literal, Protocol, runtime_checkable

from opd.tasks.prompt import Prompt
from opd.tasks.settings import DatasetSettings, FileSettings, MixSettings, TaskSettings
from opd.tasks.verdict import Verdict

Split = Literal["train", "heldout"]


@runtime_checkable
class PromptSource(Protocol):
    """A deterministic stream of prompts with the verifier of their answers."""

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        """`count` prompts of a split from position `start` on.

        The training stream is endless (tables are reshuffled every epoch); held-out prompts are distinct.

        Raises:
            DataError: when the held-out split has fewer than `start + count` distinct prompts.
        """
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion of one of this source's prompts; unknown where that is not possible, never raises."""
        ...

    def close(self) -> None:
        """Release worker processes of the verifier; the source can be used again afterwards."""
        ...


def build_prompts(settings: DatasetSettings | FileSettings | TaskSettings | MixSettings, *, seed: int) -> PromptSource:
    """The source that `settings` describe.

    Args:
        settings: an instance of the `PromptSettings` union.
        seed: decides the order of tables and the problems of procedural tasks.

    Raises:
        ConfigError: for an unknown task or verifier, or wrong task options.
        DataError: for data that cannot be read.
    """
    # Imported here because tables need pyarrow or datasets, which procedural tasks do without.
    if isinstance(settings, TaskSettings):
        from opd.tasks.procedural import build_procedural

        return build_procedural(settings, seed)
    if isinstance(settings, MixSettings):
        from opd.tasks.mix import MixedSource

        return MixedSource([(build_prompts(part, seed=seed), part.weight) for part in settings.mix])
    from opd.tasks.table import build_table

    return build_table(settings, seed)

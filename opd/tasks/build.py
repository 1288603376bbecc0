"""Building prompt sources from their settings."""

from collections.abc import Mapping
from itertools import permutations

from opd.tasks.modes import ModeSettings, ModesSource
from opd.tasks.settings import DatasetSettings, FileSettings, MixSettings, TaskSettings
from opd.tasks.source import PromptSource


def build_prompts(
    settings: DatasetSettings | FileSettings | TaskSettings | MixSettings,
    *,
    seed: int,
    modes: Mapping[str, ModeSettings] | None = None,
) -> PromptSource:
    """The prompt source that `settings` describe.

    Args:
        settings: an instance of the `PromptSettings` union.
        seed: decides the order of tables and the problems of procedural tasks.
        modes: modes by name; every prompt is asked in one of them.

    Raises:
        ConfigError: for an unknown task or verifier, or wrong options of a task.
        DataError: for data that cannot be read.
    """
    if modes:
        return ModesSource(build_prompts(settings, seed=seed), modes)
    # Imported here because tables need pyarrow or datasets, which procedural tasks do not.
    if isinstance(settings, TaskSettings):
        from opd.tasks.procedural import build_procedural

        return build_procedural(settings, seed)
    if isinstance(settings, MixSettings):
        from opd.tasks.mix import MixedSource
        from opd.tasks.table import TableSource

        parts = [(build_prompts(part, seed=seed), part.weight) for part in settings.mix]
        tables = [source for source, _ in parts if isinstance(source, TableSource)]
        for table, other in permutations(tables, 2):
            table.leave_out(other.heldout_hashes())
        return MixedSource(parts)
    from opd.tasks.table import build_table

    return build_table(settings, seed)

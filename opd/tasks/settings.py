"""Settings that say where prompts come from: a hub dataset, a file, a procedural task, or a mix of them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag

from opd.config import Settings

_OURS = {"add_generation_prompt", "continue_final_message", "conversation", "tokenize", "tokenizer_kwargs"}
_OURS |= {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
"""Arguments of the chat template that prompts depend on, and that users must not change."""


def _template_options(options: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(_OURS & options.keys())
    if taken:
        raise ValueError(
            f"{', '.join(taken)} cannot be set in template_options, because opd sets it itself; leave it out"
        )
    return options


class _Source(Settings):
    """Keys that all sources share."""

    teacher: str | None = Field(
        default=None, description="Name of the teacher for all prompts of this source that do not name one themselves."
    )
    domain: str | None = Field(
        default=None,
        description="Domain label for all prompts of this source that do not carry one themselves; metrics, samplers "
        "and routing use it.",
    )
    chat: bool = Field(
        default=False,
        description="Turn each plain-text prompt into a chat message from the user, so that the chat template applies.",
    )
    system: str | None = Field(
        default=None, description="System message put before chat prompts that do not begin with one."
    )
    template_options: Annotated[dict[str, Any], AfterValidator(_template_options)] = Field(
        default_factory=dict,
        description="Arguments passed to the tokenizer's chat template, for example enable_thinking: false.",
    )
    weight: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Share of this source in a mix: with weights 3 and 1, three prompts come from the first for every "
        "one from the second.",
    )


class _Rows(_Source):
    """Keys of sources that are tables with one prompt per row."""

    prompt_column: str = Field(
        default="prompt", description="Column that holds the prompt: text, or a list of chat messages."
    )
    answer_column: str = Field(
        default="answer",
        description="Column that holds the reference answer, or a key within a column (reward_model.ground_truth); "
        "rows may lack it.",
    )
    tools_column: str | None = Field(
        default="tools",
        description="Column with the tools that the chat template describes to the student: JSON schemas, also as JSON "
        "text; rows may lack it. null: no column holds tools.",
    )
    teacher_column: str = Field(
        default="teacher", description="Column that names the teacher of each prompt; rows may lack it."
    )
    domain_column: str = Field(
        default="domain", description="Column with the domain label of each prompt; rows may lack it."
    )
    keep_columns: list[str] = Field(
        default_factory=list,
        description="Further columns to keep with each prompt for contexts, verifiers and rewards, for example a "
        "solution, a hint or tests. Rows that name an environment keep all columns.",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Maximum number of rows to read, from the start. Default: all."
    )
    heldout: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the distinct prompts that is kept out of training for evaluation, at least one prompt; 0 "
        "keeps none out.",
    )
    verifier: str = Field(
        default="math",
        description="Verifier that judges answers: a name (`opd plugins list verifier`) or a dotted path "
        "module:attribute.",
    )
    verifier_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the verifier, if it has any, for example endpoint and model of chat_judge; `opd "
        "plugins show chat_judge` lists them.",
    )
    verifier_timeout: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that the check of one answer may take; after that its verdict is unknown, neither right "
        "nor wrong.",
    )


class DatasetSettings(_Rows):
    """Prompts from a Hugging Face dataset."""

    dataset: str = Field(description="Id of a dataset on the Hugging Face hub, or a local dataset folder.")
    subset: str | None = Field(
        default=None, description="Name of the dataset's configuration (subset), if it has several."
    )
    split: str = Field(default="train", description="Split of the dataset to read.")
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the dataset to read. Default: its main branch."
    )


class FileSettings(_Rows):
    """Prompts from a local file, one row per prompt."""

    file: Path = Field(description="Path of a .jsonl or .parquet file with one prompt per row.")
    heldout_file: Path | None = Field(
        default=None,
        description="File with the prompts to evaluate on, instead of a share of `file`. Prompts that are in both "
        "files are left out of training.",
    )


class TaskSettings(_Source):
    """Prompts that a procedural task generates, with its verifier."""

    task: str = Field(
        description="Task that generates the prompts: a name (`opd plugins list task`) or a dotted path module:Class."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the task, for example digits: 3; `opd plugins show TASK` lists them.",
    )
    mark: str = Field(
        default="",
        description="Text put before every plain-text prompt, so that a model can tell apart tasks whose problems look "
        "alike.",
    )


def _kind(value: Any) -> str | None:
    kinds = ("dataset", "file", "task", "mix")
    found = [key for key in kinds if (key in value if isinstance(value, dict) else hasattr(value, key))]
    return found[0] if len(found) == 1 else None


_ONE_OF = {
    "custom_error_type": "no_source",
    "custom_error_message": "prompts need exactly one of the keys dataset, file, task or mix",
}

SingleSource = Annotated[
    Annotated[DatasetSettings, Tag("dataset")]
    | Annotated[FileSettings, Tag("file")]
    | Annotated[TaskSettings, Tag("task")],
    Discriminator(_kind, **_ONE_OF),
]
"""One source of prompts, distinguished by the key that names it."""


class MixSettings(Settings):
    """Prompts from several sources in fixed proportions."""

    mix: list[SingleSource] = Field(min_length=1, description="Sources to draw from in turn, each with a weight.")


PromptSettings = Annotated[
    Annotated[DatasetSettings, Tag("dataset")]
    | Annotated[FileSettings, Tag("file")]
    | Annotated[TaskSettings, Tag("task")]
    | Annotated[MixSettings, Tag("mix")],
    Discriminator(_kind, **_ONE_OF),
]
"""Where prompts come from: {dataset: ...}, {file: ...}, {task: ...} or {mix: [...]}."""


def files_of(prompts: PromptSettings) -> list[Path]:
    """The local files, and folders of datasets, from which prompts are read."""
    parts = prompts.mix if isinstance(prompts, MixSettings) else [prompts]
    found: list[Path | None] = []
    for part in parts:
        if isinstance(part, FileSettings):
            found += [part.file, part.heldout_file]
        elif isinstance(part, DatasetSettings) and Path(part.dataset).is_dir():
            found.append(Path(part.dataset))
    return [path for path in found if path is not None]

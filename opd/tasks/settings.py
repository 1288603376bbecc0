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
        raise ValueError(f"{', '.join(taken)} cannot be set here; leave it out")
    return options


class _Source(Settings):
    """Keys that all sources share."""

    teacher: str | None = Field(default=None, description="Teacher of all prompts that do not name one themselves.")
    domain: str | None = Field(
        default=None, description="Domain label of all prompts that do not carry one themselves."
    )
    chat: bool = Field(default=False, description="Turn plain-text prompts into a chat message from the user.")
    system: str | None = Field(
        default=None, description="System message added to chat prompts that do not begin with one."
    )
    template_options: Annotated[dict[str, Any], AfterValidator(_template_options)] = Field(
        default_factory=dict,
        description="Options passed to the chat template, for example enable_thinking: false.",
    )
    weight: int = Field(default=1, ge=1, le=1000, description="Share in a mix: weights 3 and 1 give 3 prompts to 1.")


class _Rows(_Source):
    """Keys of sources that are tables with one prompt per row."""

    prompt_column: str = Field(
        default="prompt", description="Column with the prompt: text, or a list of chat messages."
    )
    answer_column: str = Field(
        default="answer",
        description="Column with the reference answer, or a key within one (reward_model.ground_truth); may be absent.",
    )
    teacher_column: str = Field(
        default="teacher", description="Column with a teacher's name per prompt; may be absent."
    )
    domain_column: str = Field(default="domain", description="Column with a domain label per prompt; may be absent.")
    keep_columns: list[str] = Field(
        default_factory=list,
        description="Further columns kept with each prompt, for contexts and verifiers (a solution, a hint, tests). "
        "Rows with an environment keep all columns.",
    )
    limit: int | None = Field(default=None, ge=1, description="Read at most this many rows, from the start.")
    heldout: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the distinct prompts kept out of training for evaluation; at least one, unless it is 0.",
    )
    verifier: str = Field(default="math", description="A verifier (`opd plugins list`), or a dotted path.")
    verifier_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the verifier, if it has any, for example endpoint and model of chat_judge (`opd "
        "plugins show chat_judge`).",
    )
    verifier_timeout: float = Field(default=10.0, gt=0, description="Seconds after which a check counts as unknown.")


class DatasetSettings(_Rows):
    """Prompts from a Hugging Face dataset."""

    dataset: str = Field(description="Dataset id on the hub, or a local dataset folder.")
    subset: str | None = Field(default=None, description="Configuration of the dataset, if it has several.")
    split: str = Field(default="train", description="Split to read.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the dataset.")


class FileSettings(_Rows):
    """Prompts from a local file, one row per prompt."""

    file: Path = Field(description="A .jsonl or .parquet file.")
    heldout_file: Path | None = Field(
        default=None,
        description="Evaluate on this file instead of a share of `file`; its prompts never enter training.",
    )


class TaskSettings(_Source):
    """Prompts that a procedural task generates, with its verifier."""

    task: str = Field(description="Name of a task (`opd plugins list`), or a dotted path.")
    options: dict[str, Any] = Field(default_factory=dict, description="Settings of that task, for example digits: 3.")
    mark: str = Field(
        default="",
        description="Text put before every plain-text prompt, so that a model can tell tasks with similar problems "
        "apart.",
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

    mix: list[SingleSource] = Field(min_length=1, description="The sources, each with its weight.")


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

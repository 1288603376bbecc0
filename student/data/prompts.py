"""Prompts as the student reads them: checks before a run, and a preview of one prompt."""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from opd.errors import DataError
from opd.tasks.encode import encode_prompt, encode_prompts
from opd.tasks.modes import check_marks
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.tasks.template import TemplateWatch
from opd.wire.fingerprint import chat_template_hash
from opd.wire.v1 import teacher_pb2 as pb
from student.settings.recipe import Recipe

_SHOWN_IDS = 48
_PIECE = 1024
"""Number of prompts that are encoded at once."""
_TOKENS_OF_A_BYTE, _SPECIAL = 12, 16
"""Bounds on the tokens per byte (NFKC, which some tokenizers apply, expands a character of 3 bytes to 33 bytes) and on
the special tokens around a text."""
log = logging.getLogger(__name__)


def fit_prompts(recipe: Recipe, source: PromptSource, tokenizer: Any) -> None:
    """Apply the length limit to all prompts, and check that the chat template knows the given options.

    The number of prompts that are left out, and what the chat template leaves out of prompts, is logged as a warning.

    Raises:
        DataError: for a long prompt with its file and line, or an option that the template never reads.
    """
    (first,) = source.prompts("train", 1)
    check_template_options([first], tokenizer)
    check_marks(recipe.modes, first, tokenizer)
    rollout, watch = recipe.rollout, TemplateWatch(tokenizer)
    dropped = source.limit(
        lambda prompts: _lengths(prompts, tokenizer, rollout.max_prompt_tokens, watch),
        rollout.max_prompt_tokens,
        drop=rollout.long_prompts == "drop",
    )
    if dropped:
        log.warning("prompts with more than %d tokens were left out: %d", rollout.max_prompt_tokens, dropped)


def _lengths(prompts: Iterable[Prompt], tokenizer: Any, limit: int, watch: TemplateWatch) -> Iterator[int]:
    """Tokens of each prompt, or a bound on them that `limit` is not below: short texts need not be encoded for it.

    `watch` sees all chat prompts.
    """
    left = iter(prompts)
    # In pieces: the ids of a whole data set would fill the memory.
    while piece := list(islice(left, _PIECE)):
        bounds = [_bound(prompt) for prompt in piece]
        unsure = [prompt for prompt, bound in zip(piece, bounds, strict=True) if bound > limit]
        encoded = map(len, encode_prompts(unsure, tokenizer, watch=watch))
        yield from (bound if bound <= limit else next(encoded) for bound in bounds)


def _bound(prompt: Prompt) -> int:
    """An upper bound on a prompt's tokens for any tokenizer."""
    if prompt.messages is not None or not (prompt.text or "").strip():
        return sys.maxsize
    return _TOKENS_OF_A_BYTE * len(str(prompt.text).encode()) + _SPECIAL


def check_template_options(prompts: Iterable[Prompt], tokenizer: Any) -> None:
    """Refuse options that the chat template does not use, because it would silently ignore a misspelt one.

    Raises:
        DataError: naming the option.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for prompt in prompts:
        for option in prompt.template_options:
            if template and not re.search(rf"\b{re.escape(option)}\b", template):
                raise DataError(
                    f"prompts.template_options has {option!r}, which the chat template of {tokenizer.name_or_path!r} "
                    "never reads; correct its name or remove it."
                )


def preview(prompt: Prompt, tokenizer: Any, teachers: Mapping[str, pb.TeacherInfo]) -> str:
    """One prompt as the student and its teachers read it: text, ids, and whose chat template made it.

    Args:
        prompt: the prompt.
        tokenizer: the student's.
        teachers: served models by name.
    """
    ids = encode_prompt(prompt, tokenizer)
    shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
    template = chat_template_hash(tokenizer)
    how = f"chat template {template[:12]}" if prompt.is_chat else "plain text"
    lines = [
        f"first prompt, {len(ids)} tokens: {tokenizer.decode(ids)!r}",
        f"  the student reads it as {how}: ids [{shown}]",
    ]
    for name, info in teachers.items():
        note = ""
        if prompt.is_chat and info.tokenizer.chat_template_hash != template:
            own = info.tokenizer.chat_template_hash[:12] or "none"
            note = f"; its own chat template ({own}) is different and is not used"
        lines.append(f"  {name} reads the same ids{note}")
    return "\n".join(lines)

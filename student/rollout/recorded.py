"""Recorded answers: a .jsonl file with a prompt and an answer in each line."""

import json
from pathlib import Path
from typing import Any

from opd.errors import DataError
from opd.tasks.messages import stored_messages
from opd.tasks.prompt import Prompt


def read_answers(path: Path) -> dict[int, list[str]]:
    """Answers by the content hash of their prompt, in the order of the file.

    Args:
        path: lines with "prompt" (text or chat messages) and "answer" (text); other keys are ignored.

    Raises:
        DataError: for a file that cannot be read, or a line without the two keys.
    """
    answers: dict[int, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:  # editors on Windows put a byte order mark at the start
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompt, answer = _parse(line, f"{path} line {number}")
                    answers.setdefault(prompt.content_hash, []).append(answer)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"file of answers {path} cannot be read: {error}.") from error
    return answers


def _parse(line: str, place: str) -> tuple[Prompt, str]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not valid JSON ({error}).") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("answer"), str) or "prompt" not in entry:
        raise DataError(f'{place} must be a JSON object with the keys "prompt" and "answer" (a text).')
    try:
        asked = entry["prompt"]
        content = stored_messages(asked) if isinstance(asked, str) else asked
        return Prompt.make(content, answer=entry["answer"]), entry["answer"]
    except (DataError, TypeError) as error:
        raise DataError(f"{place}: {error}") from error

"""JSON in answers: found by itself, in a fence or within text, and validated against a schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from opd.errors import ConfigError
from opd.tasks.fences import fenced
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import PlainVerifier, Verdict

_MOST = 200_000
"""Most characters of an answer that are read."""


@dataclass(frozen=True, slots=True)
class FoundJson:
    """A JSON value in an answer.

    Attributes:
        value: the object or array.
        alone: whether the answer contains nothing else except white space.
    """

    value: Any
    alone: bool


def find_json(text: str, *, opening: str = "{[", strict: bool = True) -> FoundJson | None:
    """The last JSON object or array in an answer, preferably one in a fence; None if there is none.

    Values nested in another one do not count; numbers, strings and NaN by themselves are not a JSON answer.

    Args:
        text: the answer.
        opening: first characters of what counts; "{" for objects only.
        strict: whether line breaks within strings are refused, as JSON demands.
    """
    text = text[:_MOST]
    decoder, at = json.JSONDecoder(parse_constant=_refuse, strict=strict), 0

    def parse(whole: str) -> Any | None:
        if not whole.startswith(tuple(opening)):
            return None
        try:
            return decoder.decode(whole)
        except (ValueError, RecursionError):
            return None

    whole = parse(text.strip())
    if whole is not None:
        return FoundJson(whole, alone=True)
    for block in reversed(fenced(text)):
        value = parse(block.strip())
        if value is not None:
            return FoundJson(value, alone=False)
    last: FoundJson | None = None
    while (start := min((place for mark in opening if (place := text.find(mark, at)) >= 0), default=-1)) >= 0:
        try:
            value, at = decoder.raw_decode(text, start)
            last = FoundJson(value, alone=False)
        except ValueError:
            at = start + 1
        except RecursionError:
            break  # the brackets after this one would be as deep
    return last


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def schema_errors(value: Any, schema: Mapping[str, Any] | str) -> list[str]:
    """How `value` violates a JSON schema (an object or its text): at most three clauses, each with the place.

    Raises:
        ConfigError: if the schema itself is not valid.
    """
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))
    found = []
    for error in validator.iter_errors(value):
        place = "/".join(map(str, error.absolute_path)) or "the top"
        found.append(f"{place}: {error.message[:120]}")
        if len(found) == 3:
            break
    return found


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    from jsonschema import SchemaError, validators

    try:
        parsed = json.loads(schema)
        cls = validators.validator_for(parsed)
        cls.check_schema(parsed)
    except (ValueError, SchemaError, TypeError, AttributeError) as error:
        reason = getattr(error, "message", str(error))
        raise ConfigError(f"the JSON schema {schema[:80]!r} is not valid: {reason[:200]}.") from error
    return cls(parsed)


class JsonVerifier(PlainVerifier):
    """JSON in the completion fits the prompt's schema.

    Correct if the completion contains JSON that fits the schema in the prompt's column `schema` (see keep_columns).

    Unknown without a valid schema.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        schema = prompt.extra.get("schema")
        if schema is None:
            return Verdict.unknown("the prompt has no column 'schema'; list it in prompts.keep_columns")
        found = find_json(completion)
        if found is None:
            return Verdict.of(False, "the completion contains no JSON object or array")
        errors = schema_errors(found.value, schema)
        return Verdict.of(not errors, "; ".join(errors))

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The JSON in a canonical form, the same for equal values."""
        found = find_json(completion)
        return None if found is None else json.dumps(found.value, sort_keys=True)

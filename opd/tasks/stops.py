"""Which tokens end a response: the tokenizer's, those of the model's generation config, and further ones by name.

Chat models usually end a turn with a token other than the tokenizer's end of sequence and list both in
generation_config.json. A model that is sampled with only one of them may run to the length limit.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, one_line
from opd.tasks.prompt import Prompt
from opd.tasks.template import rendered

STOP_ADVICE = (
    "if it ends with nothing else, the student is taught not to stop; name the token in rollout.stop_tokens, or set "
    "teachers.map_stops"
)
_STRANGE = -3.0
"""Nats per stop token below which two models may mean different tokens; between related models it is about -1."""
_EXPLAINED = 3.0
"""Nats that counting the other stop tokens must gain for these to be the reason."""


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token that ends a response.

    Attributes:
        id: its id.
        text: its piece.
        origin: what names it: "tokenizer", "generation_config" or "rollout.stop_tokens", joined if several do.
    """

    id: int
    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class StopSet:
    """The tokens that end a response; the tokenizer's end of sequence comes first."""

    tokens: tuple[StopToken, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Their ids, without repetition."""
        return tuple(token.id for token in self.tokens)

    def describe(self) -> str:
        """The stop tokens in one line for people."""
        if not self.tokens:
            return "stop tokens: none, so every response runs to its length limit; name one in rollout.stop_tokens"
        return "stop tokens: " + ", ".join(f"{t.text!r} (id {t.id}, from {t.origin})" for t in self.tokens)


def stop_set(tokenizer: Any, generation: Sequence[int] = (), further: Sequence[int | str] = ()) -> StopSet:
    """The tokens that end a model's response.

    Args:
        tokenizer: a Hugging Face tokenizer.
        generation: `eos_token_id` of the model's generation config, see `generation_stops`.
        further: further tokens, as ids or as text that is a single token.

    Raises:
        ConfigError: if one of `further` is not a token of the tokenizer.
    """
    found: dict[int, list[str]] = {}
    own = tokenizer.eos_token_id
    named = [(own, "tokenizer")] if own is not None else []
    named += [(token, "generation_config") for token in generation]
    named += [(_id_of(token, tokenizer), "rollout.stop_tokens") for token in further]
    for token, origin in named:
        # Ids beyond the tokenizer's are padding rows of the head, which are never sampled.
        if 0 <= int(token) < len(tokenizer):
            origins = found.setdefault(int(token), [])
            if origin not in origins:
                origins.append(origin)
    return StopSet(
        tuple(
            StopToken(token, str(tokenizer.convert_ids_to_tokens(token)), " and ".join(origins))
            for token, origins in found.items()
        )
    )


def shown(ids: Iterable[int], tokenizer: Any) -> str:
    """Tokens for a message; those that the tokenizer does not have by their ids."""
    tokens = ((token, tokenizer.convert_ids_to_tokens(token)) for token in ids)
    return ", ".join(
        f"id {token} (not a token of the student)" if text is None else repr(text) for token, text in tokens
    )


def generation_stops(path: str, revision: str | None = None) -> tuple[int, ...]:
    """`eos_token_id` of a model's generation config, else of its config; empty if neither has one.

    Args:
        path: folder or hub id.
        revision: branch, tag or commit, for a hub id.

    Raises:
        ConfigError: if the folder has a generation_config.json that cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except Exception as error:  # there is none, or it is damaged, for which libraries raise many classes
        if (Path(path) / "generation_config.json").is_file():
            reason = one_line(error, 200)
            raise ConfigError(f"the generation_config.json of model {path} cannot be read: {reason}.") from error
        try:
            ids = AutoConfig.from_pretrained(path, revision=revision).get_text_config().eos_token_id
        except (OSError, ValueError):
            return ()
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list | tuple) else (int(ids),)


def answer_end(prompt: Prompt, tokenizer: Any, stops: Collection[int]) -> int | None:
    """The id that ends an answer which is given as text; None if nothing ends one.

    In a chat, it is what the template writes after the assistant's turn, if that ends a response at all. Otherwise it
    is the tokenizer's end of sequence, or any of `stops`.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None):
        answered = replace(prompt, messages=(*prompt.messages, {"role": "assistant", "content": "x"}))
        ids = tokenizer(rendered(answered, tokenizer, opens=False), add_special_tokens=False)["input_ids"]
        if (last := next((int(token) for token in reversed(ids) if int(token) in stops), None)) is not None:
            return last
    own = tokenizer.eos_token_id
    if own is not None and (own in stops or not stops):
        return int(own)
    return min(stops, default=None)


def ends_differ(ratio: float, event: float | None) -> bool:
    """Whether a teacher gives the student's stop tokens little probability because it uses others.

    Args:
        ratio: mean log T - log S of the tokens that ended answers, in nats.
        event: the same, with the probability of all of the teacher's stop tokens for T; None if it is not known.
    """
    return event is not None and ratio < _STRANGE and event - ratio > _EXPLAINED


def verdict_on_ends(ratio: float) -> str:
    """What such a ratio says of the teacher where its own stop tokens are not what differs."""
    if ratio < _STRANGE:
        return "the teacher would rather go on there, so the student learns to write longer answers"
    return "good, the teacher ends answers there too"


def _id_of(token: int | str, tokenizer: Any) -> int:
    if isinstance(token, int):
        if not 0 <= token < len(tokenizer):
            raise ConfigError(
                f"rollout.stop_tokens names id {token}, but the tokenizer has the ids 0 to {len(tokenizer) - 1}."
            )
        return token
    known = tokenizer.get_vocab().get(token)
    ids = [known] if known is not None else tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigError(
            f"rollout.stop_tokens names {token!r}, which is {len(ids)} tokens of tokenizer "
            f"{tokenizer.name_or_path!r}; give single tokens."
        )
    return int(ids[0])

"""A set of token ids named in a recipe: special tokens, pieces of text, or plain ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from opd.config import Settings
from opd.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


class TokenSetSettings(Settings):
    """Which tokens: the union of everything that is given."""

    special: bool = Field(False, description="Include the tokenizer's special tokens, among them the end of sequence.")
    texts: list[str] = Field(
        default_factory=list, description='Texts that are one token each, for example "<think>" or "\n\n".'
    )
    ids: list[int] = Field(default_factory=list, description="Token ids.")

    @model_validator(mode="after")
    def _check(self) -> TokenSetSettings:
        if not (self.special or self.texts or self.ids):
            raise ValueError("the set of tokens is empty; set special, texts or ids")
        return self


def token_ids(settings: TokenSetSettings, tokenizer: Any) -> frozenset[int]:
    """The ids that `settings` name, for a given tokenizer.

    Raises:
        ConfigError: for a text that is not one token, or an id outside the vocabulary.
    """
    found = set(settings.ids) | (set(tokenizer.all_special_ids) if settings.special else set())
    for text in settings.texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(f"text {text!r} is {len(ids)} tokens in this tokenizer, not one; use its ids instead.")
        found.add(int(ids[0]))
    outside = sorted(i for i in found if not 0 <= i < len(tokenizer))
    if outside:
        raise ConfigError(f"token id {outside[0]} is not among the {len(tokenizer)} ids of the tokenizer.")
    return frozenset(int(i) for i in found)


def among(ids: Int[Tensor, "*N"], chosen: frozenset[int]) -> Bool[Tensor, "*N"]:
    """Which of `ids` are in the set."""
    import torch

    return torch.isin(ids, torch.tensor(sorted(chosen), dtype=ids.dtype, device=ids.device))

"""Sets of tokens that a recipe names, and tokens that keep lambda 1."""

from typing import Any

import pytest
import torch
from gradients import gradient

from opd.errors import ConfigError
from opd.wire.types import PayloadKind
from student.methods.distil.token_set import TokenSetSettings, token_ids
from student.plugin.terms import build_terms


class FakeTokenizer:
    """Characters as ids; 0 and 1 are special."""

    all_special_ids = (0, 1)

    def __len__(self) -> int:
        return 300

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_a_set_of_tokens_is_the_union_of_what_it_names() -> None:
    chosen = token_ids(TokenSetSettings(special=True, texts=["a"], ids=[7]), FakeTokenizer())
    assert chosen == {0, 1, 7, ord("a")}
    with pytest.raises(ConfigError, match="2 tokens"):
        token_ids(TokenSetSettings(texts=["ab"]), FakeTokenizer())
    with pytest.raises(ConfigError, match="300"):
        token_ids(TokenSetSettings(ids=[300]), FakeTokenizer())


def test_format_tokens_keep_lambda_one_through_the_recipe(toy: Any) -> None:
    made = toy(masked=False)
    plain_id = int(made.token_ids[0])
    entry = {"name": "exopd", "payload": "sampled", "guards": {"plain_tokens": {"ids": [plain_id]}}}
    (term,) = build_terms([entry])
    term.bind(FakeTokenizer())
    hidden, _ = made.gradient([term])
    distilled, extrapolated = (gradient(made, name=name, payload="sampled") for name in ("opd", "exopd"))
    hit = made.token_ids == plain_id
    torch.testing.assert_close(hidden[hit], distilled[hit], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(hidden[~hit], extrapolated[~hit], rtol=1e-5, atol=1e-8)
    assert made.batch().signal(PayloadKind.SAMPLED).sampled is not None

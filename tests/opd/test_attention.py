"""Which attention keeps a model's scores: found by running it, whatever its config says."""

from typing import Any

import pytest

from opd.attention import keep_scores
from opd.errors import ConfigError
from tests.support.families import tiny


def capped() -> Any:
    """A model that caps its scores and has no key for it in its config."""
    lm: Any = tiny("gemma2", attn_logit_softcapping=None)
    for layer in lm.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.5
    lm.set_attn_implementation("sdpa")
    return lm


def test_a_model_that_caps_its_scores_runs_with_eager_attention() -> None:
    lm = capped()
    keep_scores(lm, None, "attention")
    assert lm.config._attn_implementation == "eager"


def test_sdpa_is_refused_where_it_would_drop_the_cap() -> None:
    with pytest.raises(ConfigError, match="attention is sdpa, which ignores the soft-cap"):
        keep_scores(capped(), "sdpa", "attention")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_model_without_them_keeps_its_attention(family: str) -> None:
    lm = tiny(family)
    before = lm.config._attn_implementation
    keep_scores(lm, None, "attention")
    assert lm.config._attn_implementation == before

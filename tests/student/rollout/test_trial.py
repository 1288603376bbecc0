"""Trials across the lengths that a config states: where a model decodes otherwise than in one pass, it is found."""

from copy import copy
from typing import Any

import pytest
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from opd.errors import ConfigError
from student.rollout.batches import check_batches
from student.rollout.slots import takes_slots
from tests.support.families import tiny

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "cohere2", "gpt_oss"])
def test_slots_serve_a_sliding_window_up_to_its_size_and_batches_beyond(family: str) -> None:
    lm = tiny(family, sliding_window=8)
    assert takes_slots(lm, 8) and not takes_slots(lm, 9)
    check_batches(lm, 99)


@pytest.mark.parametrize("spread", [0.2, 0.6, 1.2])
@pytest.mark.parametrize("family", ["mistral", "ministral", "qwen2"])
def test_a_window_is_found_although_what_it_cuts_off_weighs_next_to_nothing(family: str, spread: float) -> None:
    changes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    if family != "mistral":  # the wider the weights' spread, the more attention goes to a single token
        changes |= {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    assert not takes_slots(tiny(family, spread=spread, sliding_window=32, **changes), 99)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_positions_that_do_not_change_with_the_length_are_decoded_beyond_it(kind: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, **more}
    assert takes_slots(tiny("llama", rope_parameters=rope), 99)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    ],
)
def test_positions_that_change_with_the_length_are_refused_beyond_it(family: str, changes: dict[str, Any]) -> None:
    lm = tiny(family, max_position_embeddings=16 if family == "llama" else 64, **changes)
    assert takes_slots(lm, 16) and not takes_slots(lm, 17)
    with pytest.raises(ConfigError, match=r"more than 16 tokens: .*rollout\.max_new_tokens"):
        check_batches(lm, 17)


@pytest.mark.parametrize("name", ["horizon", "reach_of_heads"])
def test_a_window_is_found_whatever_its_config_calls_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def windowed(config: Any, **more: Any) -> Any:
        config = copy(config)
        config.sliding_window = getattr(config, name)
        return create_sliding_window_causal_mask(config=config, **more)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    lm = tiny("llama", spread=0.6, **{name: 24})
    assert takes_slots(lm, 24) and not takes_slots(lm, 99)
    check_batches(lm, 99)

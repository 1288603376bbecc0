"""What a loaded model can do is found by trying it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from opd.heads import OutputHead
from teacher_server.engines import abilities
from teacher_server.engines.backbone import Backbone
from tests.support.families import tiny


def wrong(*arguments: Any, **keywords: Any) -> Any:
    states, weights = sdpa_attention_forward(*arguments, **keywords)
    return states * 1.5, weights


def failing(*arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError("only half precision")


@pytest.mark.parametrize(
    ("function", "used", "said"),
    [(sdpa_attention_forward, True, ""), (wrong, False, "changes hidden states"), (failing, False, "only half")],
)
def test_flash_attention_is_used_where_it_gives_the_models_numbers(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[..., Any],
    used: bool,
    said: str,
) -> None:
    AttentionInterface.register("swift", function)
    AttentionMaskInterface.register("swift", sdpa_mask)
    monkeypatch.setattr(abilities, "_FLASH", "swift")
    monkeypatch.setattr(abilities, "is_flash_attn_2_available", lambda: True)
    lm: Any = tiny("llama")
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        abilities.speed_attention(lm, Backbone(lm.base_model, lm.device), OutputHead(lm.lm_head.weight))
    assert lm.config._attn_implementation == ("swift" if used else "sdpa")
    assert bool(caplog.records) is not used and said in caplog.text


def test_positions_that_a_config_states_under_no_known_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.lengths._MOST", ())
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    for family, changes, most, turn in (("gpt2", {}, 40, None), ("llama", {"rope_parameters": rope}, 1 << 20, 40)):
        lm: Any = tiny(family, max_position_embeddings=40, **changes)
        assert abilities.find_positions(lm.config, Backbone(lm.base_model, lm.device)) == (most, turn)


def test_every_number_of_a_config_is_a_length_to_try() -> None:
    lm: Any = tiny("llama", reach=77)
    assert 77 in abilities.lengths_to_try(lm.config, Backbone(lm.base_model, lm.device), 256)

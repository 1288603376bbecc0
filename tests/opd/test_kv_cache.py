"""Models are handed their cache under the name that they have for it."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from opd.kv_cache import kept_by, reading
from tests.support.families import tiny


class Newer:
    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool = False) -> None: ...


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None, **more: Any) -> None: ...


def test_the_cache_has_the_name_that_the_model_gives_it() -> None:
    assert reading(Newer(), 1) == {"cache": 1, "use_cache": True}
    assert reading(Older(), 1) == {"past_key_values": 1, "use_cache": True}
    base: Any = tiny("llama").base_model
    out = base(torch.ones(1, 3, dtype=torch.long), **reading(base, DynamicCache(config=base.config)))
    assert kept_by(out).get_seq_length() == 3


def test_what_a_model_kept_is_found_under_either_name() -> None:
    assert kept_by({"cache": 1}) == kept_by({"past_key_values": 1}) == 1
    assert kept_by(BaseModelOutputWithPast()) is None

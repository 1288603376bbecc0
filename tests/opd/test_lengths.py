"""The lengths that configs state, under every name, and positions that a row's length scales, found by trial."""

import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from opd.lengths import Turn, most_positions, position_turn, positions_end, stated, within
from tests.support.families import CAUSAL, tiny

POSITIONS = r"position|seq_len|n_ctx|context|model_max_length"
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "key"),
    [("llama", "max_position_embeddings"), ("gpt2", "n_positions"), ("mpt", "max_seq_len"), ("rwkv", "context_length"),
     ("dbrx", "max_seq_len"), ("bloom", "max_sequence_length"), ("gemma3", "max_position_embeddings")],
)  # fmt: skip
def test_the_number_of_positions_is_known_under_the_name_that_a_family_gives_it(family: str, key: str) -> None:
    config = AutoConfig.for_model(family)
    text = config.get_text_config()
    setattr(text, key, 77)
    assert most_positions(config) == 77


def test_a_family_that_states_a_number_of_positions_has_one() -> None:
    silent = []
    for family in sorted({*CAUSAL} - {"trocr"}):
        try:
            config = AutoConfig.for_model(family)
        except (ValueError, StrictDataclassError):  # it has no defaults
            continue
        names = config.get_text_config().to_dict()
        if most_positions(config) is None and any(re.search(POSITIONS, name) for name in names if names[name]):
            silent.append(family)
    assert silent == ["cpmant"]  # whose numbers are of buckets of distances


@pytest.mark.parametrize(
    ("family", "changes", "turn"),
    [
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}, Turn(16, settles=True)),
        ("llama", {"rope_parameters": DYNAMIC}, Turn(16, settles=False)),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}}, None),
        ("gpt2", {}, None),
        ("mpt", {"max_seq_len": 16}, None),
        ("bloom", {}, None),
    ],
)
def test_positions_that_the_longest_row_of_a_pass_scales_are_found(
    family: str, changes: dict[str, Any], turn: Turn | None
) -> None:
    most = {} if family in ("mpt", "bloom") else {"max_position_embeddings": 16 if family == "llama" else 64}
    assert position_turn(tiny(family, **(most | changes)), 64) == turn


def test_a_turn_is_found_that_neither_family_nor_config_names() -> None:
    lm: Any = tiny("llama", max_position_embeddings=64)
    rotary = lm.model.rotary_emb
    forward, short = rotary.forward, rotary.inv_freq.clone()

    def turning(x: Tensor, position_ids: Tensor) -> Any:
        rotary.inv_freq = short / 4 if position_ids.max() >= 23 else short
        return forward(x, position_ids)

    rotary.forward = turning
    assert position_turn(lm, 64) == Turn(23, settles=True)
    assert rotary.inv_freq is short  # the trial leaves no other positions behind


def test_half_precision_shows_a_turn_that_moves_the_first_positions_by_less_than_it_rounds() -> None:
    factors = [1.0, 1.0, 1.5, 2.0]  # the slower a rotation, the more it is scaled, as in models that are published
    rope = LONGROPE | {"long_factor": factors}
    sizes = {"max_position_embeddings": 8192, "original_max_position_embeddings": 4096, "rope_parameters": rope}
    lm = tiny("phi3", **sizes).to(torch.bfloat16)
    assert position_turn(lm, 8192) == Turn(4096, settles=True)


def test_states_that_are_not_finite_show_no_turn() -> None:
    lm: Any = tiny("llama", max_position_embeddings=64)
    lm.model.norm.weight.data.fill_(torch.nan)
    assert position_turn(lm, 64) is None


def test_a_number_counts_whatever_it_is_called_and_however_deep_it_stands() -> None:
    config = AutoConfig.for_model("llama", reach=77, per_layer=[{"span": [78, 79]}], flag=True)
    assert {77, 78, 79} <= stated(config) and True not in {found for found in stated(config) if found is True}


def test_a_bound_leaves_the_longest_lengths() -> None:
    assert within([3, 50, 8, 40], 60) == [8, 50] and within([3, 50, 8, 40], 1000) == [3, 8, 40, 50]


@pytest.mark.parametrize("whole", [8, 1000])
@pytest.mark.parametrize(("family", "end"), [("gpt2", 40), ("llama", None), ("mamba", None), ("bloom", None)])
def test_the_end_of_a_table_of_positions_is_found_whatever_its_size_is_called(
    family: str, end: int | None, whole: int
) -> None:
    lm = tiny(family, **({"max_position_embeddings": 40} if end else {}))
    assert positions_end(lm, 200, whole) == end
    assert positions_end(lm, 40, whole) is None


def test_a_model_that_takes_whole_chunks_alone_has_positions_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lm: Any = tiny("llama")
    forward = lm.forward

    def chunked(input_ids: Tensor, **more: Any) -> Any:
        if input_ids.shape[1] % 3:
            raise ValueError("not a multiple of 3")
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(lm, "forward", chunked)
    assert positions_end(lm, 100, 1000) is None

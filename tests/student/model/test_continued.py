"""Sequences that continue a prefix: the hidden states and gradients of whole rows, with the prefix read once."""

import pytest
import torch
from families import tiny
from slow_cases import slow
from transformers import PreTrainedModel

from student.data.prefixes import Prefixes
from student.model.continued import continues, states_after
from student.model.model import Student
from student.model.recompute import recompute

PREFIXES = [[5, 6, 7, 8, 9], [3, 4]]
RESTS = [(0, [10, 11, 12]), (0, [10, 12]), (1, [13]), (1, [14, 15, 16, 17]), (0, [1])]


def read(lm: PreTrainedModel, *, shared: bool) -> torch.Tensor:
    """States of all tokens, row after row."""
    texts = [PREFIXES[number] + rest for number, rest in RESTS]
    row = torch.tensor([i for i, text in enumerate(texts) for _ in text])
    source = torch.tensor([column for text in texts for column in range(len(text))])

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)

    if not shared:
        found: torch.Tensor = Student(lm)(padded(texts), padded([[1] * len(text) for text in texts]), row, source)
        return found
    prefixes = Prefixes(padded(PREFIXES), torch.tensor([*map(len, PREFIXES)]), torch.tensor([n for n, _ in RESTS]))
    mask = padded([[1] * len(rest) for _, rest in RESTS])
    return states_after(lm, prefixes, padded([rest for _, rest in RESTS]), mask, row, source)


def gradients(lm: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    lm.zero_grad()
    states.square().mul(torch.arange(len(states))[:, None]).sum().backward()
    return torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


def compared(lm: PreTrainedModel) -> tuple[float, float]:
    whole, shared = read(lm, shared=False), read(lm, shared=True)
    return distance(shared, whole), distance(gradients(lm, shared), gradients(lm, whole))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", *slow("llama", "gpt2", "gemma2", "qwen3_moe", "phi3")])
def test_a_prefix_that_is_read_once_gives_the_states_and_gradients_of_whole_rows(family: str, attention: str) -> None:
    lm = tiny(family, attn_implementation=attention)
    assert continues(lm, 9)
    states, gradient = compared(lm)
    assert states < 1e-6 and gradient < 5e-6


def test_padding_needs_no_positions_beyond_those_of_the_longest_row() -> None:
    assert max(compared(tiny("gpt2", max_position_embeddings=8, n_positions=8))) < 5e-6


def test_layers_that_run_again_in_the_backward_pass_find_the_same_prefix() -> None:
    lm = tiny("qwen3")
    wanted = gradients(lm, read(lm, shared=False))
    recompute(lm)
    assert distance(gradients(lm, read(lm, shared=True)), wanted) < 5e-6


@pytest.mark.parametrize("family", ["mamba", *slow("qwen3_next", "bloom", "recurrent_gemma", "rwkv")])
def test_a_family_that_keeps_more_than_keys_and_values_is_read_whole(family: str) -> None:
    assert not continues(tiny(family), 9)


def test_rows_beyond_a_window_are_read_whole() -> None:
    lm = tiny("mistral", sliding_window=8)
    assert continues(lm, 8)
    assert not continues(lm, 9)

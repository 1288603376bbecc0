"""Requests: what an engine reads of a planned row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.rollout.requests import Request, RolloutSpec, encode_planned

SPEC = RolloutSpec(seed=7, batch_rows=8, candidates=0, valid_vocab=38, max_prompt_tokens=40)


@pytest.fixture(scope="module")
def tokenizer(world: Path) -> Any:
    return AutoTokenizer.from_pretrained(world / "student")


def test_the_samples_of_a_prompt_encode_it_once_and_one_with_a_hint_reads_its_own(tokenizer: Any) -> None:
    prompts = [Prompt.make("12+34="), Prompt.make("5+6=")]
    planned = list(plan_step(2, prompts, samples=3, max_new_tokens=4, temperature=1.0).rows)
    hinted = replace(planned[0].prompt, text="ends in 6: 12+34=")  # keeps the uid
    planned[0] = replace(planned[0], behaviour_prompt=hinted)
    encoded = encode_planned(planned, tokenizer, SPEC.max_prompt_tokens)
    shared = [Request(row, tokenizer, SPEC, ("rollout",), encoded) for row in planned]
    assert len(encoded) == 3, "two prompts and a hinted one"
    for row, request in zip(planned, shared, strict=True):
        alone = Request(row, tokenizer, SPEC, ("rollout",))
        assert request.input_ids.tobytes() == alone.input_ids.tobytes()
        assert request.prompt_ids.tobytes() == alone.prompt_ids.tobytes()
    assert len(shared[0].input_ids) > len(shared[1].input_ids)

"""Requests: what an engine reads of a planned row, and where the response ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.data.row import Row
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


def taken(tokenizer: Any, said: str, stop: tuple[str, ...], *, limit: int = 40, whole: bool = False) -> tuple[Row, int]:
    """The row of a response that is taken token by token, and how many tokens it took."""
    (planned,) = plan_step(2, [Prompt.make("1+1=")], samples=1, max_new_tokens=limit, temperature=1.0).rows
    request = Request(planned, tokenizer, replace(SPEC, stop_texts=stop), ("rollout",))
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    count = 0
    for token in ids:
        count += 1
        if request.take(token, -1.0, None) and not whole:
            break
    return request.row(0), count


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("=",), "12+34"),
        (("+3",), "12"),
        (("4=4", "zz"), "12+3"),
        (("6", "="), "12+34"),
        (("never",), "12+34=46"),
        ((), "12+34=46"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["token by token", "an engine that samples on"])
def test_a_stop_text_ends_a_response_across_tokens_and_is_cut_from_its_text(
    tokenizer: Any, stop: tuple[str, ...], kept: str, whole: bool
) -> None:
    row, count = taken(tokenizer, "12+34=46", stop, whole=whole)
    assert row.text == kept
    assert row.truncated == (kept == "12+34=46")
    assert whole or count == row.length
    if not row.truncated:
        said = tokenizer.decode(row.response_ids.tolist())
        assert any(text in said for text in stop) and not any(text in said[:-1] for text in stop)


def test_a_stop_text_of_several_bytes_a_character_is_found_in_the_pieces_of_its_bytes() -> None:
    """With a byte-level tokenizer, a character is several tokens."""
    alphabet = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    own = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=own)
    row, _ = taken(made, "naïve 答: no\n\nmore", ("答:", "\n\n"))
    assert row.text == "naïve " and not row.truncated
    assert taken(made, "no\n\nmore", ("答:", "\n\n"))[0].text == "no"
    assert taken(made, "x y", (" y",))[0].text == "x"

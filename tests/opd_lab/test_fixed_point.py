"""Decoding with two models at once, against enumeration."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opd.tasks import Prompt, PromptSource, build_prompts, encode_prompt
from opd.tasks.settings import TaskSettings
from opd_lab.fixed_point import Pair, decode, judge, load, pair_of
from student.data.streams import stream, uniforms
from student.model.model import Weights


@pytest.fixture(scope="module")
def pair(world: Path) -> Pair:
    return pair_of(Weights(str(world / "teacher")), load(Weights(str(world / "student"))))


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return build_prompts(TaskSettings(task="addition"), seed=3)


@pytest.fixture(scope="module")
def prompts(source: PromptSource) -> list[Prompt]:
    return list(source.prompts("train", 12))


def test_the_ends_of_the_scale_are_the_two_models(pair: Pair, prompts: list[Prompt]) -> None:
    turned = Pair(pair.reference, pair.teacher, pair.tokenizer, pair.stops)
    teacher, reference = decode(pair, prompts, 1.0, 8), decode(pair, prompts, 0.0, 8)
    assert teacher == decode(turned, prompts, 0.0, 8) and reference == decode(turned, prompts, 1.0, 8)
    assert teacher != reference


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_token_has_the_chance_of_the_normalised_product(
    pair: Pair, prompts: list[Prompt], temperature: float
) -> None:
    """One token each, drawn by the inverse of the distribution function, which is computed here from whole logits."""
    written = decode(replace(pair, temperature=temperature), prompts, 1.5, 1)
    for prompt, text in zip(prompts, written, strict=True):
        ids = torch.tensor([encode_prompt(prompt, pair.tokenizer)])
        with torch.no_grad():
            logits = (model(ids).logits[0, -1].double() for model in (pair.teacher, pair.reference))
            t, r = ((values / temperature).softmax(-1) for values in logits)
        product = t**1.5 * r**-0.5
        below = torch.cumsum(product / product.sum(), 0)
        token = int((below < uniforms(stream(0, "fixed point", prompt.uid), 1)[0]).sum())
        assert text == pair.tokenizer.decode([] if token in pair.stops else [token], skip_special_tokens=True)


def test_padding_and_other_rows_change_no_answer(pair: Pair, prompts: list[Prompt]) -> None:
    together = decode(pair, prompts, 1.25, 8)
    assert together == [decode(pair, [prompt], 1.25, 8)[0] for prompt in prompts]


def test_an_answer_ends_before_a_stop_token(pair: Pair, prompts: list[Prompt], source: PromptSource) -> None:
    whole = decode(pair, prompts, 1.0, 8)
    character = next(character for text in whole for character in text[1:])
    (token,) = pair.tokenizer(character, add_special_tokens=False)["input_ids"]
    stopped = decode(Pair(pair.teacher, pair.reference, pair.tokenizer, pair.stops | {token}), prompts, 1.0, 8)
    assert stopped == [text.partition(character)[0] for text in whole] != whole
    assert set(judge(pair, prompts, source, 1.0, 8)) <= {0.0, 1.0}


def test_an_answer_ends_at_the_limit_of_its_prompt(pair: Pair, prompts: list[Prompt]) -> None:
    whole = decode(pair, prompts, 1.25, 8)
    mixed = [replace(prompt, max_new_tokens=3) if i % 2 else prompt for i, prompt in enumerate(prompts)]
    cut = decode(pair, mixed, 1.25, 8)
    assert cut == [text[:3] if i % 2 else text for i, text in enumerate(whole)] != whole

import pytest
import torch

from opd.errors import DataError
from opd.tasks import Prompt, TaskSettings, build_prompts
from student.lab.tiny.model import make_model
from student.lab.tiny.plans import SftPlan, Shape
from student.lab.tiny.sft import corrupt, encode_rows, train_sft
from student.lab.tiny.tokenizer import make_tokenizer

SHAPE = Shape(hidden=32, layers=1, heads=2)


@pytest.fixture
def source():
    return build_prompts(TaskSettings(task="addition", options={"digits": 1}), seed=0)


def test_rows_hold_prompt_solution_and_end_and_mark_the_answer(source):
    tokenizer = make_tokenizer()
    prompts = source.prompts("train", 4)
    rows = encode_rows(prompts, tokenizer)
    for row, prompt in enumerate(prompts):
        text = tokenizer.decode(rows.ids[row][rows.answer[row]])
        assert text == prompt.extra["solution"] + "<|end|>"
        assert tokenizer.decode(rows.ids[row], skip_special_tokens=True) == prompt.text + prompt.extra["solution"]


def test_prompts_without_a_solution_are_refused():
    with pytest.raises(DataError, match="no worked solution"):
        encode_rows([Prompt.make("1+1=")], make_tokenizer())


def test_noise_replaces_answer_tokens_only_in_about_half_of_the_rows(source):
    tokenizer = make_tokenizer()
    rows = encode_rows(source.prompts("train", 200), tokenizer)
    digits = torch.tensor(tokenizer("0123456789")["input_ids"])
    changed = corrupt(rows, 0.5, digits, torch.Generator().manual_seed(0)) != rows.ids
    assert not (changed & ~rows.answer).any()
    assert 0.3 < changed.any(1).float().mean() < 0.6
    assert 0.15 < changed[rows.answer].float().mean() < 0.3


def test_training_lowers_the_loss_and_is_the_same_every_time(source):
    tokenizer = make_tokenizer()

    def run(steps):
        model = make_model(SHAPE, seed=0)
        loss = train_sft(model, tokenizer, source, SftPlan(steps=steps, batch=16, noise=0.1, warmup=2), seed=0)
        return loss, model

    (first, _), (last, model), (_, again) = run(1), run(40), run(40)
    assert last < 0.7 * first
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


def test_weights_depend_on_the_seed_and_leave_the_global_stream_alone():
    state = torch.random.get_rng_state()
    first, second, other = make_model(SHAPE, 0), make_model(SHAPE, 0), make_model(SHAPE, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

import pytest
import torch

from opd.tasks import TaskSettings, build_prompts
from student.lab.tiny.generate import accuracy, sample
from student.lab.tiny.model import make_model
from student.lab.tiny.plans import Shape
from student.lab.tiny.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def model():
    return make_model(Shape(hidden=32, layers=2, heads=2), seed=0)


@pytest.fixture
def source():
    return build_prompts(TaskSettings(task="addition", options={"digits": 3}), seed=0)


def test_greedy_answers_do_not_depend_on_the_batch_and_equal_plain_forwards(model, source):
    tokenizer = make_tokenizer()
    prompts = sorted(source.prompts("train", 6), key=lambda prompt: len(prompt.text))
    batch = sample(model, tokenizer, prompts, max_new_tokens=5, temperature=0)
    for row, prompt in enumerate(prompts):
        ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        answer = batch.ids[row, batch.prompt_length :][batch.mask[row, batch.prompt_length :].bool()]
        assert answer.tolist() == ids[0, len(prompt.text) :].tolist()


def test_sampling_is_decided_by_the_generator(model, source):
    tokenizer = make_tokenizer()
    prompts = source.prompts("train", 4)

    def draw(seed):
        return sample(model, tokenizer, prompts, max_new_tokens=8, generator=torch.Generator().manual_seed(seed)).ids

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0)[:, :10], draw(1)[:, :10])


def test_rows_stop_at_the_end_token(source):
    tokenizer = make_tokenizer()
    model = make_model(Shape(hidden=32, layers=1, heads=2, tied=False), seed=0)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is equally likely: most rows end after a while
    batch = sample(
        model, tokenizer, source.prompts("train", 64), max_new_tokens=400, generator=torch.Generator().manual_seed(0)
    )
    answers, mask = batch.ids[:, batch.prompt_length :], batch.mask[:, batch.prompt_length :]
    ended = (answers == tokenizer.eos_token_id).any(1)
    assert ended.float().mean() > 0.5
    for row in range(64):
        if ended[row]:
            last = int((answers[row] == tokenizer.eos_token_id).float().argmax())
            assert mask[row, : last + 1].all() and not mask[row, last + 1 :].any()


def test_accuracy_of_a_random_model_is_zero(model, source):
    assert accuracy(model, make_tokenizer(), source, 16, max_new_tokens=8) == 0.0

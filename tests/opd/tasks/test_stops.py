"""Which tokens end a response."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from opd.errors import ConfigError
from opd.tasks import Prompt
from opd.tasks.stops import answer_end, generation_stops, shown, stop_set, verdict_on_ends


def test_tokenizer_generation_config_and_recipe_name_stop_tokens(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    found = stop_set(tokenizer, generation_stops(str(chat_model)), ["<s>", "!", 7, "<|im_end|>"])
    assert found.ids[:3] == (2, 0, 3) and found.ids[4] == 7 and len(found.ids) == 5
    assert found.describe().startswith(
        "stop tokens: '<|im_end|>' (id 2, from tokenizer and generation_config and rollout.stop_tokens), "
        "'<|endoftext|>' (id 0, from generation_config), '<s>' (id 3, from rollout.stop_tokens)"
    )


def test_without_a_generation_config_the_model_config_names_them(chat_model, tmp_path):
    shutil.copytree(chat_model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [0, 2]}))
    assert generation_stops(str(tmp_path / "model")) == (0, 2)
    assert generation_stops(str(tmp_path / "nowhere")) == ()


def test_ids_of_padding_rows_are_left_out(chat_model):
    assert stop_set(AutoTokenizer.from_pretrained(chat_model), (263, 2)).ids == (2,)


def test_a_stop_token_that_the_tokenizer_lacks_is_shown_by_its_id(chat_model):
    text = shown([2, 263, 2**32 - 1], AutoTokenizer.from_pretrained(chat_model))
    assert text == "'<|im_end|>', id 263 (not a token of the student), id 4294967295 (not a token of the student)"


@pytest.mark.parametrize(("token", "words"), [(260, "ids 0 to 259"), ("two", "is 3 tokens"), (-1, "names id -1")])
def test_what_is_not_one_token_is_refused(chat_model, token, words):
    with pytest.raises(ConfigError, match=words):
        stop_set(AutoTokenizer.from_pretrained(chat_model), (), [token])


def test_a_model_that_never_stops_is_said():
    class Endless:
        eos_token_id = None

    assert "every response runs to its length limit" in stop_set(Endless()).describe()


def test_an_answer_ends_as_the_template_ends_a_turn(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.eos_token = "<|endoftext|>"
    chat, text = Prompt.make([{"role": "user", "content": "hi"}]), Prompt.make("hi")
    assert answer_end(chat, tokenizer, {0, 2}) == 2
    assert answer_end(chat, tokenizer, {0}) == 0
    assert answer_end(text, tokenizer, {0, 2}) == 0
    assert answer_end(text, tokenizer, {7, 9}) == 7


def test_a_ratio_at_the_ends_is_said_to_be_good_or_not() -> None:
    assert verdict_on_ends(-0.6).startswith("good") and "longer answers" in verdict_on_ends(-5.0)

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from opd_lab.tiny.tokenizer import make_tokenizer


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_one_token_per_ascii_character_and_special_tokens_first():
    tokenizer = make_tokenizer()
    assert len(tokenizer) == 260
    assert len(tokenizer("12 13:132")["input_ids"]) == 9
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_saved_tokenizer_loads_with_plain_transformers(tmp_path, shuffled):
    tokenizer = make_tokenizer(shuffled=shuffled)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (1, 0, "left")
    assert loaded("7 é")["input_ids"] == tokenizer("7 é")["input_ids"]


def test_a_shuffled_tokenizer_has_the_same_tokens_under_other_ids():
    plain, shuffled = make_tokenizer().get_vocab(), make_tokenizer(shuffled=True).get_vocab()
    assert plain.keys() == shuffled.keys() and plain["5"] != shuffled["5"] and plain["<|end|>"] == shuffled["<|end|>"]

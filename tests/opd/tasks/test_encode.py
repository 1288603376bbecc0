import pytest

from opd.errors import DataError
from opd.tasks import Prompt, encode_prompt
from student.lab.tiny.tokenizer import make_tokenizer


def test_text_is_encoded_as_it_stands():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(encode_prompt(Prompt.make("47+85="), tokenizer)) == "47+85="


def test_messages_go_through_the_chat_template_up_to_the_assistants_turn():
    tokenizer = make_tokenizer()
    chat = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ]
    text = tokenizer.decode(encode_prompt(Prompt.make(chat), tokenizer))
    assert text == "<|user|>1+1=<|assistant|>2<|end|><|user|>?<|assistant|>"


def test_messages_without_a_template_are_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(Prompt.make([{"role": "user", "content": "hi"}]), tokenizer)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ messages[7].content }}", "{% if %}"]
)
def test_messages_that_a_template_refuses_are_named(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    prompt = Prompt.make([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(DataError, match=f"refuses prompt {prompt.uid}, whose roles are system, user: "):
        encode_prompt(prompt, tokenizer)

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from opd.errors import DataError
from opd.tasks import Prompt, encode_prompt
from opd.tasks.encode import encode_prompts, encode_text
from opd_lab.tiny.tokenizer import make_tokenizer
from tests.conftest import chat_tokenizer


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
    with pytest.raises(DataError, match=f"{prompt.uid}, .* system, user: "):
        encode_prompt(prompt, tokenizer)


CHAT = [{"role": "user", "content": "hi"}]


def test_options_reach_the_chat_template(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    plain = tokenizer.decode(encode_prompt(Prompt.make(CHAT), tokenizer))
    quick = tokenizer.decode(encode_prompt(Prompt.make(CHAT, template_options={"enable_thinking": False}), tokenizer))
    assert quick == plain + "<think>\n\n</think>\n\n"


def test_a_system_message_goes_before_chats_that_have_none(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    text = tokenizer.decode(encode_prompt(Prompt.make(CHAT, system="be brief"), tokenizer))
    assert text.startswith("<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    own = [{"role": "system", "content": "mine"}, *CHAT]
    assert Prompt.make(own, system="be brief").messages == tuple(own)


@pytest.mark.parametrize("content", ["hi", CHAT], ids=["text", "chat"])
def test_a_prompt_begins_with_one_bos(chat_model, content):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    ids = encode_prompt(Prompt.make(content), tokenizer)
    assert ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]


def test_text_that_a_template_has_rendered_gets_no_second_bos(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert encode_prompt(Prompt.make(rendered), tokenizer) == encode_prompt(Prompt.make(CHAT), tokenizer)


def test_prompts_together_have_the_ids_that_each_has_alone(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    prompts = [Prompt.make(content) for content in ("hi", CHAT, rendered, "a longer text")]
    assert encode_prompts(prompts, tokenizer) == [encode_prompt(prompt, tokenizer) for prompt in prompts]
    assert encode_prompts([], tokenizer) == []


def test_an_option_that_breaks_the_template_is_named(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = "{{ limit + 1 }}"
    with pytest.raises(DataError, match=r"fails on prompt .* with template_options \{'limit': 'a'\}"):
        encode_prompt(Prompt.make(CHAT, template_options={"limit": "a"}), tokenizer)


@pytest.mark.parametrize("text", ["hi", "ends itself<|im_end|>", "<s>begins itself", ""])
@pytest.mark.parametrize("template", ["<s> $A <|im_end|>", "$A <|im_end|>", "<s> $A <|im_end|> <s>"])
def test_what_a_tokenizer_puts_after_texts_does_not_end_a_prompt(template, text):
    tokenizer = chat_tokenizer("<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 3), ("<|im_end|>", 2)]
    )
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    begins = template.startswith("<s>") and not text.startswith("<s>")
    assert encode_text(text, tokenizer) == [3] * begins + own
    if text:
        (ids,) = encode_prompts([Prompt.make(text)], tokenizer)
        assert ids == encode_prompt(Prompt.make(text), tokenizer) == encode_text(text, tokenizer)

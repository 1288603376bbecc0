import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import DataError
from opd.tasks import Prompt


def test_equal_prompts_have_equal_uids_and_different_ones_do_not():
    first = Prompt.make("2+2=", answer="4")
    assert Prompt.make("2+2=", answer="4").uid == first.uid
    assert Prompt.make("2+2=", answer="5").uid != first.uid
    assert Prompt.make("2+2=", answer="4", teacher="maths").uid != first.uid
    assert Prompt.make([{"role": "user", "content": "2+2="}], answer="4").uid != first.uid


def test_content_hash_depends_on_the_content_alone():
    assert Prompt.make("2+2=", answer="4").content_hash == Prompt.make("2+2=", teacher="maths").content_hash
    assert Prompt.make("2+2=").content_hash != Prompt.make("2+3=").content_hash


def test_uid_stays_what_recorded_runs_know():
    assert Prompt.make('a"b', answer="2", domain='\u00e9"x').uid == "0ae64da12effcb42"
    chat = [{"role": "user", "content": "h\u00e9"}]
    options = {"b": 1, "a": [1, 2]}
    assert Prompt.make(chat, answer="\n", system="s", template_options=options).uid == "53f3221944f23adb"


def test_uid_is_the_same_in_another_process():
    code = "from opd.tasks import Prompt; print(Prompt.make('a \\u00e9', answer='b').uid)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == Prompt.make("a \u00e9", answer="b").uid


@given(st.text(min_size=1), st.text())
def test_any_text_makes_a_prompt_with_a_uid_of_16_hex_digits(text, answer):
    prompt = Prompt.make(text, answer=answer)
    assert len(prompt.uid) == 16 and int(prompt.uid, 16) >= 0 and not prompt.is_chat


@pytest.mark.parametrize(
    "content", ["", [], [{"role": "user"}], [{"content": "hi"}], ["hi"], [{"role": 1, "content": ""}]]
)
def test_prompts_without_content_are_refused(content):
    with pytest.raises(DataError, match="prompt"):
        Prompt.make(content)


def test_template_options_of_plain_text_are_refused():
    with pytest.raises(DataError, match=r"template_options .*enable_thinking.* chat: true"):
        Prompt.make("hi", template_options={"enable_thinking": False})

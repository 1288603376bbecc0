import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.config import Settings
from opd.errors import ConfigError, DataError, PluginError
from opd.tasks import Prompt, PromptSource, TaskSettings, VerdictStatus, build_prompts
from opd.tasks.arithmetic import Addition
from opd.tasks.function import load_verifier
from opd.tasks.procedural import ProceduralSource
from opd.tasks.verdict import Verdict, guarded


def source_of(seed=0, **options):
    return build_prompts(TaskSettings(task="addition", options=options), seed=seed)


@settings(max_examples=10, deadline=None)
@given(first=st.integers(0, 1000), second=st.integers(0, 1000))
def test_no_seed_brings_a_heldout_prompt_into_training(first, second):
    training = {prompt.content_hash for prompt in source_of(first).prompts("train", 300)}
    heldout = {prompt.content_hash for prompt in source_of(second).prompts("heldout", 300)}
    assert len(heldout) == 300 and not training & heldout


def test_the_stream_is_indexable_and_the_same_in_every_source():
    whole = source_of().prompts("train", 20)
    assert source_of().prompts("train", 5, start=15) == whole[15:]
    assert source_of(seed=1).prompts("train", 20) != whole
    heldout = source_of().prompts("heldout", 20)
    assert source_of().prompts("heldout", 5, start=15) == heldout[15:]


def test_a_task_that_is_too_small_says_how_many_heldout_prompts_there_are():
    with pytest.raises(DataError, match=r"about \d+ distinct .*500"):
        source_of(digits=1).prompts("heldout", 500)


def test_labels_of_the_settings_reach_the_prompts():
    settings_ = TaskSettings(task="addition", teacher="sums", domain="maths", chat=True)
    prompt = build_prompts(settings_, seed=0).prompts("train", 1)[0]
    assert (prompt.teacher, prompt.domain, prompt.is_chat) == ("sums", "maths", True)
    plain = source_of().prompts("train", 1)[0]
    assert prompt.messages[0]["content"] == plain.text and plain.domain == "addition"


def test_a_verifier_that_crashes_is_unknown_and_not_wrong(monkeypatch):
    source = source_of()

    def crash(prompt, completion):
        raise RuntimeError("broken")

    monkeypatch.setattr(source.task, "verify", crash)
    verdict = source.verify(source.prompts("train", 1)[0], "x")
    assert verdict.status is VerdictStatus.UNKNOWN and "broken" in verdict.reason


def test_sources_satisfy_the_protocol_and_unknown_tasks_are_named():
    assert isinstance(source_of(), PromptSource)
    with pytest.raises(ConfigError, match=r"no task 'additon'.* 'addition'"):
        build_prompts(TaskSettings(task="additon"), seed=0)


@pytest.mark.parametrize("task", ["addition", "subtraction", "multiplication", "restate", "running_sum", "parts"])
@pytest.mark.parametrize("named", [{}, {"domain": "maths"}])
def test_no_prompt_has_a_label_that_the_source_did_not_declare(task, named):
    source = build_prompts(TaskSettings(task=task, **named), seed=0)
    prompts = source.prompts("train", 50) + source.prompts("heldout", 5)
    assert {(prompt.teacher, prompt.domain) for prompt in prompts} == source.labels()


def test_a_task_that_declares_nothing_has_unknown_labels_unless_the_settings_name_the_teacher(monkeypatch):
    from opd.tasks.arithmetic import Arithmetic

    monkeypatch.delattr(Arithmetic, "labels")
    assert source_of().labels() is None
    assert build_prompts(TaskSettings(task="addition", teacher="t"), seed=0).labels() == {("t", None)}


class Divided(Addition):
    """Sums that say themselves where they belong: those whose result is even are held out."""

    def draw_from(self, random, split):
        drawn = self.draw(random)
        while (int(drawn.answer) % 2 == 0) != (split == "heldout"):
            drawn = self.draw(random)
        return drawn


def test_a_task_may_say_itself_what_is_held_out():
    source = ProceduralSource(Divided(Divided.Options()), 0, TaskSettings(task="addition"))
    odd = {split: [int(prompt.answer) % 2 for prompt in source.prompts(split, 50)] for split in ("train", "heldout")}
    assert odd == {"train": [1] * 50, "heldout": [0] * 50}


class Undrawn:
    Options = Settings

    def __init__(self, options):
        pass

    def verify(self, prompt, completion):
        return True

    def close(self):
        pass


class Textual(Undrawn):
    def draw(self, random):
        return "1+1="


class Untimed:
    def verify(self, prompt, completion):
        return Verdict.of(True)


class Unclosed(Untimed):
    def __init__(self, timeout):
        pass


def test_a_task_of_another_shape_is_named():
    with pytest.raises(ConfigError, match="Undrawn' lacks the method draw"):
        build_prompts(TaskSettings(task=f"{__name__}:Undrawn"), seed=0)
    with pytest.raises(PluginError, match=r"Textual' drew '1\+1='; draw returns a Prompt"):
        build_prompts(TaskSettings(task=f"{__name__}:Textual"), seed=0).prompts("train", 1)


def test_a_verifier_of_another_shape_is_named():
    with pytest.raises(ConfigError, match=r"Untimed' .*timeout"):
        load_verifier(f"{__name__}:Untimed", 1.0)
    with pytest.raises(ConfigError, match="Unclosed' has no method close"):
        load_verifier(f"{__name__}:Unclosed", 1.0)


def test_what_is_not_a_verdict_leaves_it_unknown_and_says_so():
    verdict = guarded(Undrawn(None).verify, Prompt.make("1+1="), "2")
    assert not verdict.known and verdict.reason == "the verifier returned True; its method verify must return a Verdict"

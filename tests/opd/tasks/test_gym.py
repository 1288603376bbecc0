from importlib.util import find_spec

import pytest

from opd.errors import ConfigError
from opd.tasks import TaskSettings, VerdictStatus, build_prompts

# Found and not imported: whoever only collects these tests would wait for its plots and games of life.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed")


def gym(dataset, seed=0, **options):
    return build_prompts(TaskSettings(task="reasoning_gym", options={"dataset": dataset, **options}), seed=seed)


def test_the_datasets_own_verifier_judges_completions():
    source = gym("leg_counting", timeout=120)
    prompt = source.prompts("heldout", 1)[0]
    assert prompt.domain == "leg_counting"
    assert source.verify(prompt, prompt.answer).status is VerdictStatus.CORRECT
    assert source.verify(prompt, f"let me see <answer>{prompt.answer}</answer>").status is VerdictStatus.CORRECT
    assert source.verify(prompt, "no idea").status is VerdictStatus.WRONG
    source.close()


def test_problems_depend_on_seed_and_position_alone():
    assert gym("spell_backward").prompts("train", 5) == gym("spell_backward").prompts("train", 5)
    assert gym("spell_backward").prompts("train", 5) != gym("spell_backward", seed=1).prompts("train", 5)


def test_a_system_message_makes_chat_prompts():
    prompt = gym("spell_backward", system="Be brief.").prompts("train", 1)[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_unknown_datasets_and_settings_are_named():
    with pytest.raises(ConfigError, match="'leg_countin'"):
        gym("leg_countin")
    with pytest.raises(ConfigError, match="'nonsense'"):
        gym("leg_counting", config={"nonsense": 1})
    with pytest.raises(ConfigError, match="'seed' is set by the run"):
        gym("leg_counting", config={"seed": 1})

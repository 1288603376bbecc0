from importlib.util import find_spec

import pytest

from opd.errors import ConfigError
from opd.tasks import Prompt, TaskSettings, VerdictStatus, build_prompts
from opd.tasks.environments.service import make_environment
from opd.tasks.gym import GymVerifier

# Found and not imported: collecting these tests would otherwise wait for its plots and games of life.
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
    with pytest.raises(ConfigError, match="the run sets reasoning-gym's 'seed'"):
        gym("leg_counting", config={"seed": 1})


def test_several_attempts_at_a_problem_are_an_episode_that_the_dataset_judges():
    (prompt,) = gym("leg_counting", timeout=120, again={"attempts": 3, "word": "No: {reason}"}).prompts("train", 1)
    assert prompt.extra["environment"]["options"]["verifier_timeout"] == 120
    world = make_environment(dict(prompt.extra["environment"]))
    world.reset(prompt, 0)
    wrong, right = world.step("no idea"), world.step(f"<answer>{prompt.answer}</answer>")
    assert wrong.text.startswith("No: ") and not wrong.done and wrong.reward < 1
    assert right.done and right.success and right.reward == 1.0
    world.close()


def test_attempts_are_checked_before_a_run():
    with pytest.raises(ConfigError, match="again of dataset leg_counting: attempts = 1"):
        gym("leg_counting", again={"attempts": 1})


def test_a_prompt_of_no_dataset_is_unknown():
    verifier = GymVerifier()
    assert "no columns 'dataset' and 'number'" in verifier.verify(Prompt.make("1+1="), "2").reason
    verifier.close()

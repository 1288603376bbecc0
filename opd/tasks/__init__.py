"""Prompts and the verifiers of their answers: files, datasets and procedural tasks behind one interface.

from opd.tasks import TaskSettings, build_prompts
source = build_prompts(TaskSettings(task="addition", options={"digits": 3}), seed=0)
prompt = source.prompts("heldout", 1)[0]
source.verify(prompt, "12 13:132").value
"""

from opd.tasks.build import build_prompts
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.registry import TASKS, VERIFIERS
from opd.tasks.settings import DatasetSettings, FileSettings, MixSettings, PromptSettings, TaskSettings
from opd.tasks.source import PromptSource, Split
from opd.tasks.verdict import Verdict, VerdictStatus, Verifier

__all__ = [
    "TASKS",
    "VERIFIERS",
    "DatasetSettings",
    "FileSettings",
    "MixSettings",
    "Prompt",
    "PromptSettings",
    "PromptSource",
    "Split",
    "TaskSettings",
    "Verdict",
    "VerdictStatus",
    "Verifier",
    "build_prompts",
    "encode_prompt",
]

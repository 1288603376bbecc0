"""The registry of environments, in which a student acts over several turns."""

from opd.registry import Registry
from opd.tasks.environments.base import Environment, EnvironmentTask, Observation

ENVIRONMENTS = Registry(
    "environment",
    "opd.environments",
    member="Options",
    names={
        "lock": "opd.tasks.environments.lock:Lock",
        "factory": "opd.tasks.environments.factory:Factory",
        "python": "opd.tasks.environments.python_tool:PythonTool",
        "again": "opd.tasks.environments.again:Again",
        "gymnasium": "opd.tasks.environments.gymnasium:Gymnasium",
        "openenv": "opd.tasks.environments.openenv:OpenEnv",
    },
)

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentTask", "Observation"]

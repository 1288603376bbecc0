"""The registry of environments, in which a student acts over several turns."""

from opd.registry import Registry
from opd.tasks.environments.base import Environment, EnvironmentTask, Observation

ENVIRONMENTS = Registry("environment", "opd.environments", member="Options")
ENVIRONMENTS.add("lock", "opd.tasks.environments.lock:Lock", "a lock of digits, with states to recover from")
ENVIRONMENTS.add("rooms", "opd.tasks.environments.rooms:Rooms", "rooms, keys and locked doors, with a known gold path")
ENVIRONMENTS.add(
    "factory", "opd.tasks.environments.factory:Factory", "a class in the shape of TRL's environment_factory"
)
ENVIRONMENTS.add(
    "python", "opd.tasks.environments.python_tool:PythonTool", "a problem with a Python interpreter as a tool"
)
ENVIRONMENTS.add("again", "opd.tasks.environments.again:Again", "several attempts at a problem, judged by a verifier")
ENVIRONMENTS.add("textworld", "opd.tasks.environments.textworld:TextWorld", "games of TextWorld, made by tw-make")
ENVIRONMENTS.add("alfworld", "opd.tasks.environments.alfworld:ALFWorld", "household tasks in ALFWorld's text engine")
ENVIRONMENTS.add(
    "scienceworld", "opd.tasks.environments.scienceworld:ScienceWorld", "the text experiments of ScienceWorld"
)
ENVIRONMENTS.add(
    "simulated",
    "opd.tasks.environments.simulated:Simulated",
    "tasks, user, tools and judge played by a chat model (TRUSTEE)",
)
ENVIRONMENTS.add(
    "gymnasium", "opd.tasks.environments.gymnasium:Gymnasium", "a Gymnasium environment whose observations are text"
)
ENVIRONMENTS.add("openenv", "opd.tasks.environments.openenv:OpenEnv", "an environment of an OpenEnv server")

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentTask", "Observation"]

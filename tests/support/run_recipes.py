"""Train several recipes one after the other in one process, so that a pair of ranks is started once for all of them.

A recipe whose run folder exists is resumed. With --say-errors a recipe that ends with an error is followed by the
next, and its error is printed: ranks that end together can go on together.
"""

import sys
from pathlib import Path

import yaml

from opd.config import parse_settings
from opd.errors import OpdError
from student.job.session import train
from student.settings.recipe import Recipe

if __name__ == "__main__":
    says = "--say-errors" in sys.argv
    for path in (argument for argument in sys.argv[1:] if argument != "--say-errors"):
        recipe = parse_settings(Recipe, yaml.safe_load(Path(path).read_text()))
        try:
            train(recipe, resume=recipe.run.exists())
        except OpdError as error:
            if not says:
                raise
            print(f"{recipe.run.name}: {error}", flush=True)

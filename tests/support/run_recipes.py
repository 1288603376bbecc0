"""Train several recipes one after the other in one process, so that a pair of ranks is started once for all of them.

A recipe whose run folder exists is resumed.
"""

import sys
from pathlib import Path

import yaml

from opd.config import parse_settings
from student.loop import train
from student.recipe import Recipe

if __name__ == "__main__":
    for path in sys.argv[1:]:
        recipe = parse_settings(Recipe, yaml.safe_load(Path(path).read_text()))
        train(recipe, resume=recipe.run.exists())

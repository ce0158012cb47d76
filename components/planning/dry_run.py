"""`python -m components.planning.dry_run`: play the rank that a line of JSON on stdin names, and print its dry run.

The request has `recipe` (file of the run's recipe) or `schema` (name of a config class in
components.config.schema.recipes), `config` (its YAML), `world` and `rank`. The answer is a line of JSON on stdout:
{"result": ...} or {"problems": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, get_type_hints

from components.config.compose.frozen import from_yaml
from components.config.schema import recipes
from components.planning.played_run import PROBLEMS, RESULT
from components.planning.recipe_lines import import_recipe, read_lines
from components.protocol.errors import EXIT_INVALID, ConfigError


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    request = json.load(sys.stdin)
    answer: dict[str, object]
    try:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore")
        if request["recipe"] is None:
            lines, schema = None, getattr(recipes, request["schema"])
        else:
            main_of_recipe: Any = import_recipe(Path(request["recipe"]))
            lines, (schema, *_) = read_lines(main_of_recipe), get_type_hints(main_of_recipe).values()
        cfg = from_yaml(request["config"], schema)
        from components.planning.play import play

        answer = {RESULT: play(cfg, request["world"], request["rank"], lines).as_json()}
    except ConfigError as error:
        answer = {PROBLEMS: error.problems}
    with answers:
        json.dump(answer, answers)
    return EXIT_INVALID if PROBLEMS in answer else 0


if __name__ == "__main__":
    sys.exit(main())

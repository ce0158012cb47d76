"""`python -m components.planning.dry_run`: play the rank that a line of JSON on stdin names, and print its dry run.

The request has `schema` (name of a config class in components.config.schema.recipes), `config` (its YAML), `world` and
`rank`. The answer is a line of JSON on stdout: {"result": ...} or {"problems": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

from components.config.compose.frozen import from_yaml
from components.config.errors import ConfigError
from components.config.schema import recipes
from components.planning.dry_run.dry_run_children import PROBLEMS, RESULT
from components.protocol.exit_codes import EXIT_INVALID


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    request = json.load(sys.stdin)
    answer: dict[str, object]
    try:
        cfg = from_yaml(request["config"], getattr(recipes, request["schema"]))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore")
        from components.planning.dry_run.play import play

        answer = {RESULT: play(cfg, request["world"], request["rank"]).as_json()}
    except ConfigError as error:
        answer = {PROBLEMS: error.problems}
    with answers:
        json.dump(answer, answers)
    return EXIT_INVALID if PROBLEMS in answer else 0


if __name__ == "__main__":
    sys.exit(main())

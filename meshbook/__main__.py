"""One command for the recipes and tools of Meshbook.

meshbook finetune data=mine.jsonl                   # a recipe, with the same arguments as recipes/finetune.py
meshbook sweep finetune optimizer.lr=1e-5,1e-4      # the recipe with -m
meshbook plan experiment=llama3_1_8b_1node          # a tool, with the same arguments as scripts/plan.py
meshbook copy finetune mine.py                      # copy a recipe, to change it and run `python mine.py`
meshbook help optimizer                             # the keys and options of a section; also of one key: optimizer.lr
meshbook finetune --help                            # what a recipe does, its options and all its keys
eval "$(meshbook completion bash)"                  # complete commands, keys and options; or zsh
"""

from __future__ import annotations

import sys
from pathlib import Path

from components.config.compose.explain import did_you_mean, nearest
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.terminal import exit_on_broken_pipe, fit, guard_output, open_output, print_text, terminal_width
from meshbook.completion import completions, shell_script
from meshbook.key_help import describe
from meshbook.programs import COMMAND, ELSEWHERE, OTHER_COMMANDS, Program, recipes, start_recipe, start_tool, tools


def main() -> int:
    """Run the command line; return the exit status."""
    open_output()
    guard_output(sys.stderr)
    try:
        with exit_on_broken_pipe():
            return run(sys.argv[1:])
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(arguments: list[str]) -> int:
    """Run what the first argument names. Raises ConfigError for anything else."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("", "-h", "--help") or arguments == ["help"]:
        print_text(overview())
        return 0
    if name in recipes():
        start_recipe(recipes()[name], rest)
    if name in tools():
        start_tool(tools()[name], rest)
    if name == "sweep":
        start_recipe(_recipe(rest[:1], "sweep RECIPE KEY=A,B"), ["-m", *rest[1:]])
    if name == "copy":
        return copy(rest)
    if name == "help":
        print_text(fit(describe(rest, terminal_width())))
        return 0
    if name == "completion":
        print_text(shell_script(rest))
        return 0
    if name == "complete":  # called by the completion script
        print_text(*completions(rest), sep="\n")
        return 0
    known = [*recipes(), *tools(), *OTHER_COMMANDS]
    like = next((command for command, names in ELSEWHERE.items() if name in names.split()), nearest(name, known))
    raise ConfigError(f"{name}: is not a command of {COMMAND}{did_you_mean(like)}; {COMMAND} lists them")


def overview() -> str:
    """Return the list of the commands."""
    lines = [__doc__ or ""]
    groups = {
        "Recipes": {program.name: program.purpose for program in recipes().values()},
        "Tools": {program.name: program.purpose for program in tools().values()},
        "Other commands": OTHER_COMMANDS,
    }
    for title, entries in groups.items():
        lines += [f"{title}:", *(f"  {name:<14}{purpose}" for name, purpose in entries.items()), ""]
    return fit("\n".join(lines).rstrip())


def copy(arguments: list[str]) -> int:
    """Copy a recipe to a file of the user's. Raises ConfigError; an existing file is never overwritten."""
    if len(arguments) != 2:
        raise ConfigError(f"copy: takes a recipe and a file: {COMMAND} copy RECIPE FILE")
    recipe, target = _recipe(arguments[:1], "copy RECIPE FILE"), Path(arguments[1]).expanduser()
    target = target / recipe.file.name if target.is_dir() else target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x") as file:
            file.write(recipe.file.read_text("utf-8"))
    except FileExistsError as error:
        raise ConfigError(f"{target}: exists; choose another file") from error
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}; choose another file") from error
    print_text(f"{target}: copy of {recipe.file}; change it, and run python {target} KEY=VALUE")
    return 0


def _recipe(names: list[str], usage: str) -> Program:
    """Return the recipe of the first argument. Raises ConfigError if there is none."""
    known = recipes()
    if names and names[0] in known:
        return known[names[0]]
    wrong = f"{names[0]}: is not a recipe{did_you_mean(nearest(names[0], known))}" if names else "recipe missing"
    raise ConfigError(f"{wrong}; write {COMMAND} {usage}, with a recipe of {', '.join(known)}")


if __name__ == "__main__":
    sys.exit(main())

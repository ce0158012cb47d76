"""Completion of the command line in bash and zsh: commands, config groups, options, keys, and choices of a key."""

from __future__ import annotations

from components.config.compose.help_text import RECIPES, Key, keys_of, variants_of
from components.config.compose.sources import recipe_groups
from components.config.kinds import type_hints
from components.protocol.errors import ConfigError
from meshbook.key_help import all_keys, option_folders
from meshbook.programs import COMMAND, OTHER_COMMANDS, recipes, tools

BASH = f"""\
_{COMMAND}() {{
    local line=${{COMP_LINE:0:COMP_POINT}} words
    read -ra words <<<"$line"
    [[ $line == *" " ]] && words+=("")
    mapfile -t COMPREPLY < <({COMMAND} complete "${{words[@]:1}}" 2>/dev/null)
    case ${{words[-1]}} in
        *=*) COMPREPLY=("${{COMPREPLY[@]#*=}}") ;;  # bash completes the part after =
    esac
    case ${{COMPREPLY[0]}} in
        *= | *.) compopt -o nospace ;;
        "") compopt -o default ;;
    esac
}}
complete -F _{COMMAND} {COMMAND}"""
ZSH = f"""\
_{COMMAND}() {{
    local -a found
    found=("${{(@f)$({COMMAND} complete "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n $found ]]; then
        compadd -S "" -- ${{(M)found:#*[=.]}}  # a key and a section go on: no space
        compadd -- ${{found:#*[=.]}}
    else
        compset -P "*="
        _files
    fi
}}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
compdef _{COMMAND} {COMMAND}"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def shell_script(arguments: list[str]) -> str:
    """Return the completion script of a shell. Raises ConfigError for another shell."""
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        shells = " or ".join(SCRIPTS)
        raise ConfigError(f'completion: takes a shell, {shells}, as in eval "$({COMMAND} completion bash)"')
    return SCRIPTS[arguments[0]]


def completions(words: list[str]) -> list[str]:
    """Return what the last of the words after `meshbook` may become; a key ends with =, a section with a period."""
    *before, word = words or [""]
    return [candidate for candidate in _candidates(before, word) if candidate.startswith(word)]


def _candidates(before: list[str], word: str) -> list[str]:
    if not before:
        return [*recipes(), *tools(), *OTHER_COMMANDS]
    command = before[0]
    if command == "completion":
        return list(SCRIPTS)
    if command in ("copy", "sweep") and len(before) == 1:
        return list(recipes())
    if command == "help":
        return _shortened([*all_keys(), *recipes(), *tools()], word)
    name = before[1] if command == "sweep" else command
    if name not in RECIPES:
        return []
    key, has_value, _ = word.partition("=")
    groups = recipe_groups(name, option_folders())
    if has_value:
        known = _keys(name)
        return [f"{key}={value}" for value in groups.get(key) or (known[key].choices if key in known else ())]
    keys = [f"{each}=" for each in _keys(name)]
    return _shortened([*(f"{group}=" for group in groups), *keys], word)


def _shortened(keys: list[str], word: str) -> list[str]:
    """Return the keys up to the first period after `word`."""
    found: list[str] = []
    for key in keys:
        if key.startswith(word):
            head, period, _ = key[len(word) :].partition(".")
            found.append(f"{word}{head}{period}")
    return list(dict.fromkeys(found))


def _keys(recipe: str) -> dict[str, Key]:
    """Return the keys of a recipe, of every kind, without those that contain keys."""
    found: dict[str, Key] = {}
    for section, schema in type_hints(RECIPES[recipe]).items():
        for variant in variants_of([schema]).values():
            found |= {name: key for name, key in keys_of(variant, section).items() if key.type != "section"}
    return found

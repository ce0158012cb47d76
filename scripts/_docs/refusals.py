"""Messages of rejected configs, read from the source of the rules.

A message is a string or an f-string of the form `KEY=VALUE: rule; what to change` in a dataclass of the schema, in a
rule, or in the argument of `raise ConfigError(...)`. The range checks of components/protocol/errors.py
(`at_least`, `above`, `within`) are read from their calls.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts._docs.markdown import NOTE, ROOT, cell, code, table

GROUPS = (
    ("The command line", ("config/compose",)),
    ("Keys of one section", ("config/schema", "protocol/errors")),
    ("Several sections, the mesh and the model", ("config", "protocol/secrets")),
    (
        "This machine, the run directory and sweeps",
        ("launch", "launch/sweep", "protocol/secrets"),
    ),
    ("Slurm and Kubernetes", ("launch/job",)),
    ("Slurm", ("launch/slurm",)),
    ("Kubernetes", ("launch/k8s",)),
    ("Data", ("data", "data/sources", "batch")),
    ("Checkpoints and exports", ("checkpoint", "models/weights")),
    (
        "After the model's structure is read",
        (
            *("distributed", "distributed/process", "models"),
            *("training", "training/objectives", "training/optimizers"),
            "planning/formulas",
        ),
    ),
)
"""Heading of the page -> folders below components/ whose messages it lists."""
WITHOUT_RAISE = ("config", "config/compose", "config/schema", "protocol/errors")
"""Folders whose functions return messages; elsewhere they must be raised, or returned by a function of problems."""
ERRORS = ("ConfigError", "RunDirectoryInUse", "CheckpointError")
RANGES = {
    "at_least": "must be at least {}",
    "above": "must be greater than {}",
    "within": "must lie between {} and {}",
}
MESSAGE = re.compile(r"[\w.{}\[\]<>+@/()' -]+?(=\S[^:]*?)?: (?=\S)|[\w.]*\{[\w.]+\}: |\{key\}")
REPORTS = re.compile("problem|refus|reject|explain|check|too_many")
"""Names of functions that return messages."""
Names = dict[str, ast.expr]
HOLE = "\N{HORIZONTAL ELLIPSIS}"
HOLES = rf"\{{\w+\}}|{HOLE}"


@dataclass(frozen=True)
class Refusal:
    """One message; `{name}` and an ellipsis are values that it fills in."""

    template: str
    file: str
    """Path of the source file from the root of the repository."""

    def matches(self, message: str) -> bool:
        """Return whether a message is this one, with any values."""
        first, *rest = re.split(HOLES, self.template)
        if not rest:
            return message == first
        *inner, last = rest
        position = len(first)
        for literal in inner:
            position = message.find(literal, position) + len(literal)
            if position < len(literal):
                return False
        return message.startswith(first) and message.endswith(last) and position <= len(message) - len(last)


@functools.cache
def refusals(folder: str) -> list[Refusal]:
    """Return the messages of the files in components/FOLDER (not below it), or of the module components/FOLDER.py."""
    path = ROOT / "components" / folder
    elsewhere = {ROOT / "components" / f"{part}.py" for _, parts in GROUPS for part in parts}
    files = sorted(set(path.glob("*.py")) - elsewhere) if path.is_dir() else [path.with_suffix(".py")]
    found = [
        Refusal(template, str(file.relative_to(ROOT)))
        for file in files
        for template in _templates(_parsed(file), everywhere=folder in WITHOUT_RAISE)
    ]
    return list(dict.fromkeys(found))


@functools.cache
def all_refusals() -> list[Refusal]:
    """Return the messages of all groups, and those about values of the wrong type."""
    source = "components/config/compose/explain.py"
    values = [Refusal(f"{{key}}={{value}}: {rule}", source) for rule in _value_rules()]
    return values + [refusal for _, folders in GROUPS for folder in folders for refusal in refusals(folder)]


def _value_rules() -> list[str]:
    """Return the rules about the types of values."""
    found = []
    for node in ast.walk(_parsed(ROOT / "components/config/compose/typed.py")):
        raised = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(raised, ast.Call) and ast.unparse(raised.func) == "ValueError":
            found += [_text(branch, {}) for branch in _branches(raised.args[0])]
        elif isinstance(node, ast.FunctionDef) and node.name == "unstorable":
            found += [_text(each.value, {}) for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
    return [text for text in dict.fromkeys(found) if text and " " in text]


def _branches(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Name):
        return [_constants()[node.id]] if node.id in _constants() else []
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def page() -> str:
    """Return the page that lists every message."""
    parts = [
        f"{NOTE}\n# Refusals\n",
        "A rejected config ends the command with exit status 2, before anything is written, with all problems at once. "
        "Each message states the value, the rule and the key to change. Names in braces and "
        "ellipses stand for values. Keys of a mixture's source are written `data.sources.NAME.KEY`.\n",
    ]
    for heading, folders in GROUPS:
        found = [refusal for folder in folders for refusal in refusals(folder)]
        parts.append(f"## {heading}\n")
        if folders == GROUPS[0][1]:
            rules = [["`KEY=VALUE`", cell(rule)] for rule in _value_rules()]
            parts += ["Values of the wrong type, for every key:\n", table(["value", "rule, and what to change"], rules)]
        for file in dict.fromkeys(each.file for each in found):
            rows = [[code(key), cell(rule)] for key, rule in map(_split, (e.template for e in found if e.file == file))]
            parts += [f"From {code(file)}:\n", table(["value", "rule, and what to change"], rows)]
    return "\n".join(parts)


def _split(template: str) -> tuple[str, str]:
    """Return the key with its value, and the rest of a message."""
    key, _, rule = template.partition(": ")
    return ("", template) if not rule or key.count("(") > key.count(")") else (key, rule)


def _templates(tree: ast.Module, *, everywhere: bool) -> Iterator[str]:
    for node, names in _message_nodes(tree, everywhere, _constants() | _assigned(tree.body) | _returned(tree.body)):
        template = _range(node, names) if isinstance(node, ast.Call) else _text(node, names)
        if template and MESSAGE.match(template) and _states_a_rule(template):
            yield re.sub(r"\s+", " ", template)


def _states_a_rule(template: str) -> bool:
    """Return whether a message has at least three words besides its key and values."""
    rule = re.sub(HOLES, " ", _split(template)[1])
    return len(re.findall(r"[A-Za-z]{2,}", rule)) >= 3 and "(?P<" not in template


def _message_nodes(tree: ast.AST, everywhere: bool, names: Names) -> Iterator[tuple[ast.expr, Names]]:
    """Yield the strings and range checks in the order of the source, with the texts that names stand for there."""
    for node in ast.iter_child_nodes(tree):
        raises = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS
        reports = isinstance(node, ast.FunctionDef) and bool(REPORTS.search(node.name))
        inside = names | _assigned(ast.walk(node)) if isinstance(node, ast.FunctionDef) else names
        constant = isinstance(tree, ast.Module) and isinstance(node, ast.Assign)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RANGES:
            yield node, names
        elif isinstance(node, ast.JoinedStr | ast.Constant):
            if everywhere:
                yield node, names
        else:
            yield from _message_nodes(node, everywhere or raises or reports or constant, inside)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def _constants() -> Names:
    """Return the texts of the constants of all modules, which other modules import; names that two modules use are left
    out."""
    found: dict[str, list[ast.expr]] = {}
    for file in sorted((ROOT / "components").rglob("*.py")):
        for name, text in _assigned(_parsed(file).body).items():
            if name.isupper():
                found.setdefault(name, []).append(text)
    return {name: texts[0] for name, texts in found.items() if len(texts) == 1}


def _assigned(nodes: Iterable[ast.AST]) -> Names:
    """Return the names that are assigned to a string, once: `key = f"model.qat={model.qat}"`."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs = list(zip(target.elts, values, strict=False))
        for name, text in pairs:
            if isinstance(name, ast.Name):
                found.setdefault(name.id, []).append(text)
    return {name: each[0] for name, each in found.items() if len(each) == 1 and _text(each[0], {}) is not None}


def _returned(body: list[ast.stmt]) -> Names:
    """Return the functions of a module that end with the return of a string, which may be part of a message."""
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    last = {node.name: node.body[-1] for node in functions}
    texts = {name: each.value for name, each in last.items() if isinstance(each, ast.Return) and each.value is not None}
    return {name: text for name, text in texts.items() if isinstance(text, ast.JoinedStr)}


def _text(node: ast.expr, names: Names) -> str | None:
    """Return a string with its placeholders shortened: the last name of an expression without `_`, or an ellipsis."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            value = part.value.func if isinstance(part.value, ast.Call) else part.value
            name = getattr(value, "id", None) or getattr(value, "attr", None) or "__"
            known = names.get(name) if isinstance(value, ast.Name) else None
            name = "__" if isinstance(part.value, ast.Call) else name
            shown = HOLE if name.startswith("__") else f"{{{name.removeprefix('_')}}}"
            parts.append(shown if known is None else _text(known, {}) or shown)
        elif isinstance(part, ast.Constant):
            parts.append(str(part.value))
    return "".join(parts)


def _range(call: ast.Call, names: Names) -> str | None:
    """Return the message of a call of a range check."""
    key, bounds = _text(call.args[0], names), [_bound(each) for each in call.args[2:]]
    if key is None:
        return None
    return f"{key}={{value}}: {RANGES[call.func.id].format(*bounds)}"  # type: ignore[attr-defined]


def _bound(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if re.fullmatch(r"-?[\d.e]+", text) else HOLE

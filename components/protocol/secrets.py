"""Detection of secrets: a config that holds one is rejected, and no message shows one.

A run inherits the environment of the shell that starts it, also under Slurm, so a config never needs to hold a token.
Imports only the standard library, since every message passes `masked`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any
from urllib.parse import quote

_SHORTEST = 8
"""Minimum length of a secret variable's value to search for in the config; shorter ones would match by chance."""

_CREDENTIALS = {
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "a wandb API key": r"\bwandb_v\d+_\w{20,}|wandb\s+login\s.{0,200}?\b[0-9a-f]{40}\b|\blocal-[0-9a-f]{40}\b",
    "an API key (sk-...)": r"(?<![\w-])sk-(?=[\w-]*\d)[\w-]{20,}",
    "a Google API key": r"\bAIza[\w-]{35}",
    "a GitHub token": r"\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{20,}",
    "a PyPI token": r"\bpypi-[\w-]{20,}",
    "a Stripe key": r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/]{20,}",
    "an NVIDIA API key": r"\bnvapi-[\w-]{20,}",
    "a Groq API key": r"\bgsk_[A-Za-z0-9]{20,}",
    "a webhook": r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{10,}"
    r"|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "an API key of a provider": r"\bxai-\w{20,}|\br8_\w{20,}|\bpplx-\w{20,}|\bfw_\w{20,}|\btgp_v1_[\w-]{20,}"
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bdapi[0-9a-f]{32}|\bdckr_pat_[\w-]{20,}|\bhv[sb]\.[\w-]{20,}"
    r"|\bdop_v1_[0-9a-f]{40,}|\bglsa_\w{20,}|\bATATT3[\w=-]{20,}|\blin_api_\w{20,}|\bntn_\w{20,}"
    r"|\btskey-[\w-]{20,}|\bAGE-SECRET-KEY-\w{20,}|\bshp(?:at|ss|ca|pa)_[0-9a-f]{20,}|\bfigd_[\w-]{20,}"
    r"|\bCFPAT-[\w-]{20,}|\bPMAK-[\w-]{20,}|\bnfp_\w{20,}|\bsbp_[0-9a-f]{20,}|\brnd_\w{20,}",
    "an Azure key": r"\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=[\w+/%=-]{20,}|[?&]sig=[\w%+/=-]{20,}",
    "a bot token": r"\b\d{8,10}:AA[\w-]{30,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitLab token": r"\bgl(?:pat|rt|cbt|dt|ptt|soat|ft)-[\w-]{20,}",
    "a Slack token": r"\bxox[a-z]-[\w-]{10,}",
    "a JSON Web Token": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?:[\s\S]*-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*)",
    "a bearer token": r"(?i:\bbearer)\s+(?=[\w.~+/-]*\d)[\w.~+/=-]{20,}"
    r"|(?i:\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?)(?:\w+\s+)?(?![\w.]*\.{3})[\w.~+/=-]{8,}",
    "a signed URL": r"(?i:[?&;]x-(?:amz|goog)-(?:signature|credential|security-token)|[?&;](?:sig|signature))="
    r"[\w%+/=.~-]{8,}",
    "a URL with a token": r"(?<=://)(?=[\w-]*\d)[\w-]{20,}(?=@)",
}
_CREDENTIAL = [(what, re.compile(pattern)) for what, pattern in _CREDENTIALS.items()]
_ANY_CREDENTIAL = re.compile("|".join(f"(?:{pattern})" for pattern in _CREDENTIALS.values()))
_HEX_KEY = re.compile(r"[0-9a-f]{40}")  # wandb API key; a git commit has the same form
_LOGIN = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://[^\s/:@]{0,200}:(?P<password>[^\s/]+)@", re.IGNORECASE)

_PASSWORD_OPTION = re.compile(
    r"""(?x)
    \b(?:mysql\w*|mariadb[\w-]*|sshpass|docker|podman|helm|skopeo|oras|crane|az|twine|kinit|smbclient|mongo\w*)\b
        [^;&|]{0,1000}?\s-p\s*(?P<p>"[^"]*"|'[^']*'|[^\s;&|]+)
    | \b(?:curl|http|https|xh|ab|wget|aria2c)\b[^;&|]{0,1000}?\s(?:-u|-U|-a|--user|--proxy-user|--auth)[\s=]?
        ["']?[^\s:"';&|]+:(?P<u>[^\s"';&|]+)
    | \bredis-cli\b[^;&|]{0,1000}?\s-a\s*(?P<a>[^\s;&|]+)
    """
)
"""Passwords in one-letter options of specific programs; in others the option is harmless (mkdir -p, ssh -p 22)."""
_PUBLISHED = re.compile(r"[\d.:]+(?:-\d+)?(?::[\d-]+)?(?:/\w+)?")  # docker run -p 8080:80

_ASSIGNMENT = re.compile(
    r"(?<![\w${])(?P<name>[A-Za-z_][\w-]{0,100})(?:\s=\s|=(?!=))"  # export NAME=value
    r"|(?<![\w-])--(?P<option>[A-Za-z][\w-]{0,100})\s+"  # --name value
    r"|\$\{(?P<variable>\w{1,100}):?[-=]"  # ${NAME:-value}
    r"|(?:[\"']|(?<!\$)[{,]\s*)(?P<key>[\w-]{1,100})\\*[\"']?\s*:\s*"  # {name: value}
)
"""Beginnings of assignments of a value to a name in shell, JSON or YAML text."""
_VALUE = re.compile(
    r"""\\*"[^"]*"|\\*'[^']*'|<[^<>]*>|\[[^\]]*\]|\{[^}]*\}|(?:\$\{[^}]{0,1000}\}|[^\s;&|,)}]){0,10000}"""
)
_FALLBACK = re.compile(r"[^}]*")

_REFERENCE = re.compile(
    r"\\?\$(\w+|\{\w+(:?\?[^}]*|:?[-+=](\$\w+|\$\{\w+)?\}?)?\}|\(.*)|`.*|<[^<>]*>|\[[A-Z_]+\]|[.*]{3,}\W*", re.DOTALL
)
"""$NAME, ${NAME}, ${NAME:?message}, ${NAME:-$OTHER}, $(command), `command`, <placeholder>, [PAD], ..., ***"""
_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"}

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_ENDS = ("TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "APIKEY", "ACCESSKEY",
                "PRIVATEKEY", "CREDENTIAL", "CREDENTIALS")  # fmt: skip
_KEYS = {"API", "ACCESS", "PRIVATE", "SIGNING", "ENCRYPTION", "KAGGLE", "DEPLOY", "SSH", "GPG", "PGP", "AUTH", "MASTER",
         "ACCOUNT", "STORAGE", "LICENSE", "SERVICE", "SERVER", "CLIENT", "ADMIN", "ROOT", "SECURITY", "HMAC", "JWT",
         "OPENAI", "ANTHROPIC", "WANDB", "HF", "COMET", "NEPTUNE", "AZURE", "AWS", "GCP", "GOOGLE", "STRIPE", "SLACK",
         "GITHUB", "GITLAB", "DATADOG", "SENTRY", "SENDGRID", "TWILIO", "NGC", "NVIDIA"}  # fmt: skip
_SECRET_LASTS = {"PAT", "COOKIE", "COOKIES", "JWT", "PWD", "PASS", "PASSCODE", "OTP", "WEBHOOK"}
_WORKING_DIRS = {"PWD", "OLDPWD"}
_HARMLESS_VARIABLES = {
    *("USER", "LOGNAME", "USERNAME", "GROUP", "UID", "HOME", "PWD", "HOSTNAME", "HOST", "SHELL", "LANG", "TERM", "TZ"),
    *("SCRATCH", "WORK", "PROJECT", "STORE", "TMPDIR", "TMP", "TEMP", "DATA", "DATA_ROOT", "DATA_DIR", "LOCAL_SCRATCH"),
    *(
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_ENDPOINT",
    ),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "WANDB_PROJECT"),
    *("WANDB_ENTITY", "MASTER_ADDR", "CI_COMMIT_SHA", "GITHUB_SHA"),
}
"""Variables that an interpolation may copy into the config, besides those of the scheduler."""
_SCHEDULER_PREFIXES = ("SLURM_", "PBS_")
_NO_SECRET_LASTS = {"FILE", "PATH", "DIR", "NAME"}
_VOCABULARY = {"PAD", "BOS", "EOS", "UNK", "SEP", "CLS", "MASK", "IMAGE", "AUDIO", "VIDEO", "SPECIAL", "START",
               "END", "STOP", "PER"}  # fmt: skip
_OF_A_TOKEN = {"ID", "IDS", "INDEX", "TYPE", "TYPES", "COUNT", "LIMIT", "BUDGET", "LENGTH", "SIZE", "EMBEDDINGS"}
_COMMITS = {"REVISION", "COMMIT", "SHA"}
_TEMPLATE = ("model", "chat_template")
"""Path of the key that holds the text of a chat template."""
_MASK = "***"

_REMEDY = "remove it, and export it in the shell before you start the run, which inherits the environment"


def secret_problems(cfg: object, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    """Return one message, without the value, for each key of `cfg` whose value looks like a secret.

    Rejects credentials with a well-known format, values with a secret name (api_key; HF_TOKEN=... in a shell
    line), and values that contain the value of a secret environment variable, since interpolations such as
    ${oc.env:HF_TOKEN} are resolved before a config is typed. A reference ($HF_TOKEN) is allowed.

    Args:
        cfg: Config of nested dataclasses, dicts and lists.
        arguments: Command-line overrides (KEY=VALUE), which are recorded too.
        environ: Environment variables; default: those of this process.
    """
    secret_variables = _secret_values(os.environ if environ is None else environ)
    values: Any = asdict(cfg) if is_dataclass(cfg) and not isinstance(cfg, type) else cfg
    run = values.get("run") if isinstance(values, Mapping) else None
    allowed = run.get("allow_env") or () if isinstance(run, Mapping) else ()
    secret_variables = {value: name for value, name in secret_variables.items() if name not in allowed}
    found: dict[str, str] = {}
    for key, names, text in _texts(values, "", ()):
        what = _secret(names, text, secret_variables)
        if what is not None:
            found[key if _is_printable_key(key, names, secret_variables) else key.partition(".")[0]] = what
    for argument in arguments:
        key, _, text = argument.partition("=")
        key = key.lstrip("+~")
        names = tuple(key.split("."))
        whole = names if names == _TEMPLATE else ()
        what = _secret(names, text, secret_variables) or _secret(whole, argument, secret_variables)
        if what is not None and not any(re.match(rf"{re.escape(key)}([.\[]|$)", other) for other in found):
            found[key if _is_printable_key(key, names, secret_variables) else "the command line"] = what
    return [f"{key}: {what}, which would be written to the run directory; {_REMEDY}" for key, what in found.items()]


def variable_problem(key: str, name: str, value: str, allowed: Collection[str]) -> str | None:
    """Return the problem of a variable that an interpolation copied to `key` and that may be secret, or None.

    Every value that is long enough for a secret is rejected, since names like DB_PWD or DEPLOY_KEY follow no pattern.

    Args:
        key: Config key that contains the value.
        name: Name of the variable.
        value: Value of the variable.
        allowed: Variables declared harmless by the user (run.allow_env).
    """
    listed = name in _HARMLESS_VARIABLES or name.startswith(_SCHEDULER_PREFIXES)
    if len(value) < _SHORTEST or name in allowed or (listed and not _is_secret_name(name)):
        return None
    if os.path.isabs(value) and os.path.exists(value):
        return None
    return (
        f"{key}: holds the value of the environment variable {name}, which would be written to the run directory; if "
        f"it is not a secret, set run.allow_env=[{name}]; else {_REMEDY}"
    )


def _is_secret_name(name: str) -> bool:
    """Return whether the name of a variable, key or option marks its value as secret: HF_TOKEN, apiKey, --password."""
    parts = [part.upper() for part in _PARTS.findall(name)]
    if not parts or parts[-1] in _NO_SECRET_LASTS:
        return False
    return any(_is_secret_part(parts, index) for index in range(len(parts)))


def _is_secret_part(parts: list[str], index: int) -> bool:
    part, before = parts[index], parts[index - 1] if index else ""
    after = parts[index + 1] if index + 1 < len(parts) else ""
    if part in _SECRET_LASTS and not after and (before or part not in _WORKING_DIRS):
        return True
    if part == "TOKEN" and (before in _VOCABULARY or after in _OF_A_TOKEN):
        return False  # a token of a tokenizer
    return part.endswith(_SECRET_ENDS) or (part == "KEY" and before in _KEYS)


def masked(text: str) -> str:
    """Return a text with each secret in it replaced by ***: the filter that everything for people to read passes.

    Secrets are what `secret_problems` rejects: credentials with a well-known format, passwords in URLs and command
    lines, values with a secret name, and the values of this process's secret variables and command-line arguments.
    """
    for value in _known_secrets(tuple(sys.argv[1:]), tuple(os.environ.items())):
        text = text.replace(value, _MASK)
    text = _ANY_CREDENTIAL.sub(_MASK, text)
    spans = [found.span("password") for found in _LOGIN.finditer(text) if not _REFERENCE.fullmatch(found["password"])]
    for found in _PASSWORD_OPTION.finditer(text):
        option = str(found.lastgroup)
        if _is_literal("", found[option]) and not _PUBLISHED.fullmatch(found[option]):
            spans.append(found.span(option))
    spans += [span for _, span in _assigned_secrets(text)]
    end = len(text)
    for start, stop in sorted(spans, reverse=True):  # a value may hold another assignment
        if stop <= end:
            text, end = text[:start] + _MASK + text[stop:], start
        elif start < end:
            text, end = text[:start] + _MASK + text[end:].removeprefix(_MASK), start
    return text


def shown_value(key: str, value: object) -> object:
    """Return the value of a key as a message may show it: *** if a name in its path marks it as secret."""
    is_secret = any(_is_secret_name(name) for name in key.split(".")) and _is_literal(key, str(value))
    return _MASK if is_secret else value


@functools.lru_cache(maxsize=1)
def _known_secrets(arguments: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the secrets in the command line and the environment as messages may quote them, longest first."""
    variables = _secret_values(dict(environ))
    values = [*variables, *(login["password"] for _, text in environ for login in _LOGIN.finditer(text))]
    for before, argument in zip(("", *arguments), arguments, strict=False):
        key, is_assigned, value = argument.partition("=")
        names = tuple(re.split(r"[./@]", key.lstrip("+~-")))
        if is_assigned and _secret(names, value, variables):
            values += [value, value.strip("\"'")]
            values += [argument.lstrip("+~")] if len(value) < _SHORTEST and _is_literal(names[-1], value) else []
        elif before.startswith("--") and _is_secret_name(before) and not argument.startswith("-"):
            values.append(argument)
    # Messages quote single lines of a key in PEM format, and values as they are escaped in JSON, URLs and shells.
    values += [line for value in values for line in value.splitlines() if len(line) > 2 * _SHORTEST]
    written = {
        form
        for value in values
        if len(value) >= _SHORTEST and _is_literal("", value)
        for form in (
            value,
            repr(value)[1:-1],
            json.dumps(value)[1:-1],
            quote(value),
            quote(value, ""),
            shlex.quote(value),
        )
    }
    return sorted(written, key=len, reverse=True)


def _secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of variables with a secret name, mapped to the name."""
    values = {name: value.strip() for name, value in environ.items() if _is_secret_name(name)}
    return {value: name for name, value in values.items() if len(value) >= _SHORTEST and _is_literal(name, value)}


def _texts(value: Any, key: str, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each string below `value`, including dict keys: its dotted key, the names of its path, and the string."""
    if isinstance(value, str):
        yield key, names, value
    elif isinstance(value, Mapping):
        for name, nested in value.items():
            yield key or "a key", (), str(name)
            yield from _texts(nested, f"{key}.{name}".lstrip("."), (*names, str(name)))
    elif isinstance(value, list | tuple | set):
        for index, nested in enumerate(value):
            yield from _texts(nested, f"{key}[{index}]", names)


def _secret(names: tuple[str, ...], text: str, secret_variables: Mapping[str, str]) -> str | None:
    """Return why `text`, found at the path `names`, is a secret, or None."""
    for value, variable in secret_variables.items():
        if value in text:
            return f"holds the value of the variable {variable}"
    for what, pattern in _CREDENTIAL:
        if pattern.search(text):
            return f"holds what looks like {what}"
    for login in _LOGIN.finditer(text):
        if not _REFERENCE.fullmatch(login["password"]):
            return "holds a URL with a password"
    if any(_is_secret_name(name) for name in names) and _is_literal(names[-1], text):
        return "holds a secret, according to its name"
    if _HEX_KEY.fullmatch(text.strip()) and not (names and _COMMITS & set(_PARTS.findall(names[-1].upper()))):
        return "holds what looks like a wandb API key (40 hexadecimal digits; shorten a commit)"
    if names == _TEMPLATE and ("{{" in text or "{%" in text):
        return None  # a program, which assigns control tokens: {% set system_token = "<|system|>" %}
    if problem := _option_password(text):
        return problem
    return next((f"assigns a value to {name}" for name, _ in _assigned_secrets(text)), None)


def _assigned_secrets(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each secret name in a text, such as a shell line, and the span of the literal value assigned to it."""
    start = 0
    while found := _ASSIGNMENT.search(text, start):
        name, start = found[str(found.lastgroup)], found.end()
        if not _is_secret_name(name):
            continue  # a value may hold another assignment
        value = (_FALLBACK if found["variable"] else _VALUE).match(text, start)
        if value and _is_literal(name, value[0]):
            yield name, value.span()
            start = max(value.end(), start)


def _option_password(text: str) -> str | None:
    for found in _PASSWORD_OPTION.finditer(text):
        option, value = next((option, value) for option, value in found.groupdict().items() if value)
        if _is_literal("", value) and not _PUBLISHED.fullmatch(value):
            return f"holds a password (-{option})"
    return None


def _is_printable_key(key: str, names: Sequence[str], secret_variables: Mapping[str, str]) -> bool:
    """Return whether the path `names` of a key is safe to print: keys of a dict may be secrets."""
    return all(_secret((), text, secret_variables) is None for text in (key, *names))


def _is_literal(name: str, value: str) -> bool:
    """Return whether `value` is a literal, and not a reference (variable, command, file), a placeholder or a switch."""
    bare = value.strip().strip("\"'\\").strip()
    if bare.lower() in _SWITCHES or _REFERENCE.fullmatch(bare):
        return False
    is_path = bare.startswith(("/", "~/", "./", "../"))
    return not (is_path and ("CREDENTIAL" in name.upper() or os.path.exists(os.path.expanduser(bare))))

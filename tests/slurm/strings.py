"""Strings that break careless quoting in shells, #SBATCH lines, YAML, Hydra's grammar and paths.

Those that contain shell commands create a file named CANARY if they are executed.
"""

from __future__ import annotations

import re

CANARY = "CANARY"

HOSTILE = {
    "newline": ["two\nlines", "\n", f"a\n#SBATCH --comment=stolen\ntouch {CANARY}", "ends\n"],
    "carriage_return": ["a\rb", "a\r\nb", f"\rtouch {CANARY}"],
    "tab": ["a\tb", "\t", "\tfirst"],
    "spaces": ["two words", "  around  ", "many    in    it", " "],
    "quotes": ["it's", 'say "so"', "''", '"', "'\"'\"'", f"'; touch {CANARY}; '", f'" --wrap="touch {CANARY}'],
    "substitution": [f"$(touch {CANARY})", f"a$(touch {CANARY})b", f'"$(touch {CANARY})"', "$((1+1))", "<(date)"],
    "variable": ["$HOME", "$", "$$", "$1", "$@"],
    "backtick": [f"`touch {CANARY}`", "`", f"a `touch {CANARY}` b"],
    "separator": [
        f"; touch {CANARY}",
        f"a & touch {CANARY} &",
        f"| tee {CANARY}",
        f"> {CANARY}",
        f"x && touch {CANARY}",
    ],
    "glob": ["*", "[a-z]*", "/e?c/*", "?"],
    "dash": ["-rf", "--wrap=date", "-", "--"],
    "backslash": ["\\", "a\\nb", "\\\\", "\\'", 'ends \\"', "C:\\new"],
    "percent": ["%j", "100%", "%(name)s", "%%"],
    "hash": ["# comment", "a#b", "#SBATCH --hold", " # "],
    "tilde": ["~", "~root", "a~b"],
    "braces": ["{}", "{{ run_dir }}", "{% raw %}", "{a,b}", "{#x#}"],
    "history": ["!", "!!", "wow!"],
    "unicode": ["Grüße", "模型", "🚀 up", "e\u0301", "\u202eltr", "a\u00a0b", "\u2028", "\ufeffmark"],
    "control": ["\x1b[31mred", "\x01", "a\x7fb", "bell\a", "a\x85b"],
    "yaml": ["null", "true", "1e3", "- a", "a: b", "&x", "*x", "???"],
    "reference": ["${HOME}", "a${run.seed}b", "${oc.env:HOME}", "${", "\\${x}"],
    "empty": [""],
}
"""By kind; at least three of each, except the empty one."""

UNSTORABLE = {"???", "a\x85b"}
"""Strings no config can store: omegaconf's marker for a missing value, and a line break of YAML."""


def quoted(text: str) -> str:
    r"""Return `text` as a value on the command line: omegaconf's escape of `${`, then Hydra's single quotes.

    Backslashes are escapes only before `${`, before a quote and at the end.
    """
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    doubled = re.sub(r"(\\+)(?='|\Z)", r"\1\1", plain)
    return "'" + doubled.replace("'", "\\'") + "'"

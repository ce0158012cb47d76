"""The `meshbook` command: one entry to the recipes and the tools, from any folder.

__main__.py      main: which recipe, tool or question a command line names
programs.py      the recipes and tools: where they are, what they do, and how one is started
key_help.py      meshbook help KEY: keys and options as text
completion.py    the words that a shell may complete

A wheel also installs recipes/, scripts/, conf/ and slurm/ in this package; in a checkout they are next to it.
"""

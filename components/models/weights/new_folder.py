"""A folder that appears under its name once it is complete, whatever is killed before."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

_OLD = "-old"


class NewFolder:
    """A folder in the making, under a name of its own beside the one that it will have.

    What killed attempts left beside it goes when the next one begins. Of two attempts at the same name at once, the
    one that began first is taken for killed: it fails with an OSError at the next file that it opens, or at the end,
    and the other one publishes. Attempts at different names do not see one another.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is its name to be; nothing is written yet."""
        self.folder = folder
        self.path = self._fresh()
        """Where it is until then."""

    def begin(self) -> None:
        """Remove what earlier attempts left, put back what they had moved away, and make the folder. Raises OSError."""
        ours = re.compile(rf"{re.escape(self.folder.name)}\.tmp-[0-9a-f]{{8}}({_OLD})?")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left in sorted(each for each in self.path.parent.iterdir() if ours.fullmatch(each.name)):
            with contextlib.suppress(OSError):  # somebody else's, or gone by now: not in the way
                if left.name.endswith(_OLD) and not os.path.lexists(self.folder):
                    left.rename(self.folder)  # killed after it was moved away, before another was there
                    continue
                # Its name goes first and at once, so that a process that is still writing there cannot publish the rest
                aside = left.rename(self._fresh())
                shutil.rmtree(aside, ignore_errors=True)
        self.path.mkdir()

    def publish(self) -> None:
        """Put it under its name, in place of what is there. Raises OSError; what was there is then there again."""
        old = self.path.with_name(f"{self.path.name}{_OLD}")
        if os.path.lexists(self.folder):  # a file, or a link that leads nowhere, has the name too
            self.folder.rename(old)
        try:
            self.path.rename(self.folder)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(self.folder):
                old.rename(self.folder)
            raise
        if old.is_symlink() or old.is_file():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _fresh(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp-{secrets.token_hex(4)}")

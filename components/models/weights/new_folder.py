"""Atomic creation of a folder, which gets its name only once it is complete, even if its writer is killed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

_OLD = "-old"
_OF_AN_EXPORT = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(adapter_|generation_|tokenizer_)?config\.json"
    r"|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(additional_)?chat_templates?(\.jinja|\.json)?|README\.md"
)
"""Names of files of an earlier export, which the new one replaces even if it has no such file."""


class NewFolder:
    """A folder that is written under a temporary name next to its final one, and then renamed.

    Each attempt first deletes the temporary folders of killed attempts. If two processes write the same folder at once,
    the one that began first is treated as killed: it fails with OSError at the next file that it opens or in `publish`,
    and the other one succeeds. Attempts with different final names are independent.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the final path; nothing is written yet."""
        self.folder = folder
        self.path = self._temporary_name()
        """Temporary path to write to until `publish`."""

    def begin(self) -> None:
        """Delete leftovers of killed attempts, restore a folder that they moved away, and create `path`.

        Raises OSError.
        """
        pattern = re.compile(rf"{re.escape(self.folder.name)}\.tmp-[0-9a-f]{{8}}({_OLD})?")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in sorted(each for each in self.path.parent.iterdir() if pattern.fullmatch(each.name)):
            with contextlib.suppress(OSError):  # of another user, or deleted meanwhile: it does not disturb
                if leftover.name.endswith(_OLD) and not os.path.lexists(self.folder):
                    leftover.rename(self.folder)  # `publish` was killed between its two renames
                    continue
                # Rename before deleting: a process that still writes there can then not publish a partial folder.
                renamed = leftover.rename(self._temporary_name())
                shutil.rmtree(renamed, ignore_errors=True)
        self.path.mkdir()

    def publish(self) -> None:
        """Rename the folder to its final path, replacing what exists there but for the files of others.

        Raises OSError; the existing folder is then restored.
        """
        old = self.path.with_name(f"{self.path.name}{_OLD}")
        if os.path.lexists(self.folder):  # true for files and dangling links too, which must also be moved away
            self.folder.rename(old)
        try:
            self.path.rename(self.folder)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(self.folder):
                old.rename(self.folder)
            raise
        if old.is_symlink() or not old.is_dir():
            old.unlink(missing_ok=True)
            return
        for each in old.iterdir():
            if not (_OF_AN_EXPORT.fullmatch(each.name) or os.path.lexists(self.folder / each.name)):
                each.rename(self.folder / each.name)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _temporary_name(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp-{secrets.token_hex(4)}")

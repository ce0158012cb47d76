"""The checkpoints below a URL. Imports no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from components.checkpoint.folders import PUBLISHED
from components.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from components.storage.object_store import ObjectStore, StoredObject
from components.storage.urls import join

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RemoteCheckpoint:
    """Objects below a name like that of a checkpoint."""

    url: str
    objects: dict[str, StoredObject]
    """By file name."""
    manifest: Manifest | None
    """None: the copy was not finished, or its manifest is damaged."""

    @property
    def name(self) -> str:
        """Last part of the URL, such as step_40."""
        return self.url.rpartition("/")[2]

    @property
    def is_complete(self) -> bool:
        """Whether all files of the manifest exist with their sizes."""
        if self.manifest is None:
            return False
        sizes = {name: each.bytes for name, each in self.objects.items()}
        return all(sizes.get(name) == record.bytes for name, record in self.manifest.files.items())


def list_remote(store: ObjectStore, url: str) -> list[RemoteCheckpoint]:
    """Return the checkpoints below `url`, by name; warn about damaged manifests. Raises StorageError."""
    prefix = join(url, "")
    folders: dict[str, dict[str, StoredObject]] = {}
    for each in store.list(url):
        folder, _, name = each.url.removeprefix(prefix).partition("/")
        if PUBLISHED.fullmatch(folder) and name:
            folders.setdefault(folder, {})[name] = each
    return [RemoteCheckpoint(join(url, name), found, _manifest(store, found)) for name, found in folders.items()]


def _manifest(store: ObjectStore, objects: dict[str, StoredObject]) -> Manifest | None:
    if MANIFEST not in objects:
        return None
    try:
        return Manifest.parse(store.read(objects[MANIFEST].url).decode())
    except FileNotFoundError:  # removed since it was listed
        return None
    except (ManifestError, UnicodeDecodeError) as error:
        logger.warning("checkpoint %s is skipped: %s", objects[MANIFEST].url.rpartition("/")[0], error)
        return None

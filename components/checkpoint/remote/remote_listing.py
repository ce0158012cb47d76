"""The checkpoints below a URL. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from components.checkpoint.folders import PUBLISHED
from components.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from components.storage.object_store import ObjectStore, StoredObject
from components.storage.urls import join


@dataclass(slots=True)
class RemoteCheckpoint:
    """Objects below a name like that of a checkpoint."""

    url: str
    objects: dict[str, StoredObject]
    """By their names below the URL, those that other programs wrote too."""
    manifest: Manifest | None
    """None: the copy was not finished, or its manifest is damaged."""
    damage: str = ""
    """What is wrong with the manifest, if there is one."""

    @property
    def name(self) -> str:
        """Last part of the URL, such as step_40."""
        return self.url.rpartition("/")[2]

    @property
    def problems(self) -> list[str]:
        """A line for each file of the manifest that is missing or has another size; empty if all are there."""
        if self.manifest is None:
            return [self.damage or f"{MANIFEST} is missing"]
        found = {name: each.bytes for name, each in self.objects.items()}
        return [
            f"{name} is missing" if name not in found else f"{name} has {found[name]} bytes instead of {record.bytes}"
            for name, record in self.manifest.files.items()
            if found.get(name) != record.bytes
        ]

    @property
    def strangers(self) -> list[str]:
        """Names of the objects that are not of this checkpoint."""
        own = {MANIFEST} if self.manifest is None else {MANIFEST, *self.manifest.files}
        return [name for name in self.objects if name not in own]


def list_remote(store: ObjectStore, url: str) -> tuple[list[RemoteCheckpoint], list[str]]:
    """Return the checkpoints below `url`, by name, and the names of all objects there. Raises StorageError."""
    prefix = join(url, "")
    names: list[str] = []
    folders: dict[str, dict[str, StoredObject]] = {}
    for each in store.list(url):
        names.append(each.url.removeprefix(prefix))
        folder, _, name = names[-1].partition("/")
        if PUBLISHED.fullmatch(folder) and name:
            folders.setdefault(folder, {})[name] = each
    return [_checkpoint(store, join(url, name), found) for name, found in folders.items()], names


def find_remote(store: ObjectStore, url: str) -> RemoteCheckpoint:
    """Return the checkpoint at `url`. Raises StorageError."""
    prefix = join(url, "")
    return _checkpoint(store, url, {each.url.removeprefix(prefix): each for each in store.list(url)})


def _checkpoint(store: ObjectStore, url: str, objects: dict[str, StoredObject]) -> RemoteCheckpoint:
    manifest, damage = None, ""
    if MANIFEST in objects:
        try:
            manifest = Manifest.parse(store.read(objects[MANIFEST].url))
        except FileNotFoundError:  # removed since it was listed
            pass
        except ManifestError as error:
            damage = str(error)
        except ValueError as error:
            damage = f"{MANIFEST} cannot be read: {error}"
    return RemoteCheckpoint(url, objects, manifest, damage)

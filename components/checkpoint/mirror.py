"""Copies of checkpoints in an object store: written, listed, fetched back and removed by the retention policy."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from components.checkpoint.manifest import Manifest, ManifestError, fail_together, reasons_to_keep, sync_folder
from components.config.schema.run import CheckpointConfig
from components.json_collectives import all_gather_json, broadcast_json, this_rank
from components.protocol.errors import ConfigError
from components.protocol.run_files import CHECKPOINT_MANIFEST, checkpoint_name, checkpoint_step, temporary_name
from components.storage.object_store import ObjectStore, StoredObject, join, name_of, shown_names, upload_folder
from components.storage.run_claim import OWNER, RunClaim, check_claim, take_claim, write_claim
from components.watch.faults import fault_point

logger = logging.getLogger(__name__)


class Mirror:
    """Copies of a run's checkpoints below a URL, each under the name that it has in the run directory.

    The manifest of a copy is written last and removed first, so a checkpoint that has one is complete. A name that has
    one is never written again. run.json records the objects of each copy before they are written; no others are
    replaced or removed.
    """

    def __init__(self, url: str, policy: CheckpointConfig) -> None:
        self.url, self._policy = url.rstrip("/"), policy
        self.newest_serial = 0
        """Highest serial below the URL when the run started, on rank 0; later checkpoints continue from it."""
        self.damaged: list[str] = []
        """URLs of copies that proved damaged when the run resumed; retention neither counts nor removes them."""
        self._claim = RunClaim("")

    @classmethod
    def open(cls, policy: CheckpointConfig, run_dir: Path | str) -> Mirror | None:
        """Return the mirror of checkpoint.remote, or None without one. A collective.

        Rank 0 writes which run uses the URL, which also shows that it can be written.

        Raises:
            ConfigError: Another run uses the URL, or objects that no run has written are below it.
            CheckpointError: On every rank, if the store cannot be read or written.
        """
        if policy.remote is None:
            return None
        mirror = cls(policy.remote, policy)
        run = str(Path(run_dir).absolute())
        mirror._on_rank_0(f"checkpoint.remote={policy.remote} cannot be used", lambda: mirror._take(run))
        return mirror

    @cached_property
    def store(self) -> ObjectStore:
        """The store, opened in the process and at the time of its first use."""
        return ObjectStore(self.url)

    def copies(self) -> list[_RemoteCheckpoint]:
        """Return the checkpoints below the URL. Raises StorageError."""
        return _list_remote(self.store, self.url)[0]

    def upload(self, path: Path, group: dist.ProcessGroup | None = None) -> str:
        """Copy a published checkpoint, then remove those that the policy does not keep; return its URL. A collective.

        The ranks share the work by files. An intact copy that exists is kept.

        Args:
            group: Process group of all ranks; None: the default group.

        Raises:
            CheckpointError: On every rank, if one of them could not read or write after all attempts.
        """
        failure = f"checkpoint {path} could not be copied to {self.url}"
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        url, is_copied = self._on_rank_0(failure, lambda: self._begin(path), group)
        with fail_together(failure, group):
            files = Manifest.read(path).files
            by_size = sorted(files, key=lambda name: files[name].bytes, reverse=True)
            for name in () if is_copied else by_size[rank::world]:
                fault_point("while_copying")
                self.store.upload(path / name, join(url, name))

        def finish() -> None:
            if not is_copied:
                fault_point("before_remote_manifest")
                self.store.write(join(url, CHECKPOINT_MANIFEST), (path / CHECKPOINT_MANIFEST).read_bytes())
                fault_point("after_remote_manifest")
            self._prune(url)

        self._on_rank_0(failure, finish, group)
        return url

    def upload_export(self, folders: list[Path]) -> None:
        """Copy exported folders below the URL, by rank 0. A collective.

        Raises CheckpointError on every rank, also if it would replace objects that this run has not written.
        """

        def copy() -> None:
            for folder in folders:
                url, prefix = join(self.url, folder.name), join(self.url, folder.name, "")
                files = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
                own = self._claim.folders.get(folder.name, [])
                listed = {each.url.removeprefix(prefix) for each in self.store.list(url)}
                if strangers := sorted(listed.intersection(files).difference(own)):
                    raise FileExistsError(
                        f"this run did not write {shown_names([join(url, name) for name in strangers])}; remove them, "
                        f"and run the command again, or use the export in {folder}"
                    )
                self._record(folder.name, [*own, *(name for name in files if name not in own)])
                is_adapter = (folder / "adapter_config.json").is_file()
                upload_folder(self.store, folder, url, "adapter_config.json" if is_adapter else "config.json")

        self._on_rank_0(f"the export could not be copied to {self.url}", copy)
        if (repeats := self.repeats()) is not None:
            logger.warning(repeats)

    def has_written(self, name: str) -> bool:
        """Return, on rank 0, whether this run has written the copy with this name, or begun to."""
        return name in self._claim.folders

    def repeats(self) -> str | None:
        """Return a line about this rank's failed requests since the last call; None if there were none."""
        return self.store.repeats()

    def _on_rank_0(self, failure: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
        """Run `work` on rank 0, and return its result on every rank. A collective.

        Raises its ConfigError, and CheckpointError for other errors, on every rank.
        """
        result, problem = None, None
        with fail_together(failure, group):
            if this_rank() == 0:
                try:
                    result = work()
                except ConfigError as error:
                    problem = str(error)
        result, problem = broadcast_json([result, problem], group=group)
        if problem is not None:
            raise ConfigError(problem)
        return result

    def _take(self, run: str) -> None:
        """Write that the URL belongs to this start, before its first copy. Raises ConfigError and StorageError."""
        existing, names = _list_remote(self.store, self.url)
        serials = [each.manifest.serial for each in existing if each.manifest is not None]
        self.newest_serial = max(serials, default=0)
        self._claim = take_claim(self.store, self.url, run, [] if serials else names)
        if left := [each.name for each in existing if each.name not in self._claim.folders]:
            logger.warning("%s: not recorded in %s, so never removed: %s", self.url, OWNER, shown_names(left))

    def _record(self, name: str, files: list[str]) -> None:
        """Record the objects of a folder before they are written. Raises ConfigError and StorageError."""
        self._claim.folders[name] = files
        write_claim(self.store, self.url, self._claim)

    def _begin(self, path: Path) -> tuple[str, bool]:
        """Return the URL to copy a checkpoint to, and whether it has been copied there; record its files otherwise.

        The URL is that of an equal, intact copy, of an unfinished one of this run, which is removed, or a new one.
        """
        manifest, again = Manifest.read(path), 0
        by_name = {copy.name: copy for copy in self.copies()}
        name = path.name
        while (found := by_name.get(name)) is not None:
            is_intact = not found.problems and found.url not in self.damaged
            if found.manifest == manifest and is_intact:
                return found.url, True
            own = self._claim.folders.get(name, [])
            if CHECKPOINT_MANIFEST not in found.objects and not set(found.objects).difference(own):
                self.store.remove(each.url for each in found.objects.values())
                break
            again += 1
            name = checkpoint_name(manifest.step, again)
        for folder in list(self._claim.folders):
            if checkpoint_step(folder) is not None and folder not in by_name:  # removed
                del self._claim.folders[folder]
        self._record(name, [*manifest.files, CHECKPOINT_MANIFEST])
        return join(self.url, name), False

    def _prune(self, newest: str) -> None:
        """Remove complete copies that the policy does not keep, and unfinished ones, which a killed save has left.

        Only objects that run.json records are removed.
        """
        try:
            check_claim(self.store, self.url, self._claim)
            mirrored = {copy.name: copy for copy in self.copies() if copy.name in self._claim.folders}
            complete = [
                (each, each.manifest)
                for each in mirrored.values()
                if each.manifest is not None and not each.problems and each.url not in self.damaged
            ]
            reasons = reasons_to_keep([manifest for _, manifest in complete], self._policy)
            removed = [each for (each, _), reason in zip(complete, reasons, strict=True) if not reason]
            removed += [each for each in mirrored.values() if CHECKPOINT_MANIFEST not in each.objects]
            for each in removed:
                if each.url != newest:
                    own = self._claim.folders[each.name]
                    names = sorted(each.objects.keys() & own, key=lambda name: name != CHECKPOINT_MANIFEST)
                    self.store.remove(each.objects[name].url for name in names)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.url, error)


@dataclass(slots=True)
class _RemoteCheckpoint:
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
            return [self.damage or f"{CHECKPOINT_MANIFEST} is missing"]
        sizes = {name: each.bytes for name, each in self.objects.items()}
        return [
            f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]} bytes instead of {record.bytes}"
            for name, record in self.manifest.files.items()
            if sizes.get(name) != record.bytes
        ]

    @property
    def strangers(self) -> list[str]:
        """Names of the objects that are not of this checkpoint."""
        own = {CHECKPOINT_MANIFEST} if self.manifest is None else {CHECKPOINT_MANIFEST, *self.manifest.files}
        return [name for name in self.objects if name not in own]


def _list_remote(store: ObjectStore, url: str) -> tuple[list[_RemoteCheckpoint], list[str]]:
    """Return the checkpoints below `url`, by name, and the names of all objects there. Raises StorageError."""
    prefix = join(url, "")
    names: list[str] = []
    folders: dict[str, dict[str, StoredObject]] = {}
    for each in store.list(url):
        names.append(each.url.removeprefix(prefix))
        folder, _, name = names[-1].partition("/")
        if checkpoint_step(folder) is not None and name:
            folders.setdefault(folder, {})[name] = each
    return [_checkpoint(store, join(url, name), found) for name, found in folders.items()], names


def _find_remote(store: ObjectStore, url: str) -> _RemoteCheckpoint:
    """Return the checkpoint at `url`. Raises StorageError."""
    prefix = join(url, "")
    return _checkpoint(store, url, {each.url.removeprefix(prefix): each for each in store.list(url)})


def _checkpoint(store: ObjectStore, url: str, objects: dict[str, StoredObject]) -> _RemoteCheckpoint:
    manifest, damage = None, ""
    if CHECKPOINT_MANIFEST in objects:
        try:
            manifest = Manifest.parse(store.read(objects[CHECKPOINT_MANIFEST].url))
        except FileNotFoundError:  # removed since it was listed
            pass
        except ManifestError as error:
            damage = str(error)
        except ValueError as error:
            damage = f"{CHECKPOINT_MANIFEST} cannot be read: {error}"
    return _RemoteCheckpoint(url, objects, manifest, damage)


def fetch_checkpoint(
    mirror: Mirror, url: str, folder: Path, verify: Callable[[Path], list[str]]
) -> tuple[Path | None, list[str]]:
    """Copy the checkpoint at `url` into `folder`, and return its path and its problems. A collective.

    The ranks share the download by files: those that the manifest lists, whatever else is there. The copy is verified
    under a temporary name, and renamed if it is complete.

    Args:
        verify: Collective that returns the missing or damaged files of a folder, the same on every rank.

    Returns:
        The path, or None if the checkpoint is damaged; the problems, the same on every rank.

    Raises:
        CheckpointError: On every rank, if the store or the disk fails: that is no damage, and an older checkpoint would
            repeat steps.
    """
    failure = f"checkpoint {url} could not be copied to {folder}"
    tmp = folder / broadcast_json(temporary_name(name_of(url)))
    final = folder / name_of(url)
    listed: list[StoredObject] = []
    problems: list[str] = []
    with fail_together(failure):
        if this_rank() == 0:
            copy = _find_remote(mirror.store, url)
            problems = copy.problems
            if copy.manifest is not None and not problems:
                if copy.strangers:
                    logger.warning("checkpoint %s: not of it, and left there: %s", url, shown_names(copy.strangers))
                tmp.mkdir(parents=True)
                listed = [copy.objects[name] for name in (CHECKPOINT_MANIFEST, *copy.manifest.files)]
    listed, problems = broadcast_json([listed, problems])
    if problems:
        return None, problems
    listed = [StoredObject(*each) for each in listed]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    absent = []
    try:
        with fail_together(failure):
            # Largest first, so that the ranks get about equally many bytes.
            for each in sorted(listed, key=lambda each: each.bytes, reverse=True)[rank::world]:
                try:
                    mirror.store.download(each, tmp / name_of(each.url))
                except FileNotFoundError:
                    absent.append(f"{name_of(each.url)} is missing")
        problems = [problem for part in all_gather_json(absent) for problem in part] or verify(tmp)
        if not problems:
            with fail_together(failure):
                if this_rank() == 0:
                    final = _publish(tmp, final)
    except BaseException:
        _remove(tmp)
        raise
    if problems:
        _remove(tmp)
        return None, problems
    return Path(broadcast_json(str(final))), []


def _publish(tmp: Path, final: Path) -> Path:
    """Rename the folder to `final`, or to the next free name like it if a damaged checkpoint occupies that."""
    sync_folder(tmp)
    name, again = final.name.partition(".")[0], 0
    while os.path.lexists(final):
        again += 1
        final = final.with_name(f"{name}.{again}")
    os.rename(tmp, final)
    sync_folder(final.parent)
    return final


def _remove(tmp: Path) -> None:
    if this_rank() == 0:
        shutil.rmtree(tmp, ignore_errors=True)

"""Copy the checkpoints of a run to an object store, and apply the retention policy there."""

from __future__ import annotations

import json
import logging
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from components.checkpoint.checkpoint_error import fail_together
from components.checkpoint.listing import reasons_to_keep
from components.checkpoint.manifest import MANIFEST, Manifest
from components.checkpoint.remote.remote_listing import RemoteCheckpoint, list_remote
from components.config.errors import ConfigError
from components.config.schema.checkpoint import CheckpointConfig
from components.exchange import broadcast_json, this_rank
from components.resilience.faults import fault_point
from components.storage.object_store import ObjectStore, upload_folder
from components.storage.urls import join

logger = logging.getLogger(__name__)

OWNER = "run.json"
"""Object that names the run whose checkpoints are below a URL."""


class Mirror:
    """Copies of a run's checkpoints below a URL, each under the name that it has in the run directory.

    The manifest of a copy is written last and removed first, so a checkpoint that has one is complete. A name that has
    one is never written again.
    """

    def __init__(self, url: str, policy: CheckpointConfig) -> None:
        self.url, self._policy = url.rstrip("/"), policy
        self.newest_serial = 0
        """Highest serial below the URL when the run started, on rank 0; later checkpoints continue from it."""

    @classmethod
    def open(cls, policy: CheckpointConfig, run_dir: Path | str) -> Mirror | None:
        """Return the mirror of checkpoint.remote, or None without one. A collective.

        Rank 0 writes which run uses the URL, which also shows that it can be written.

        Raises:
            ConfigError: Another run uses the URL.
            CheckpointError: On every rank, if the store cannot be read or written.
        """
        if policy.remote is None:
            return None
        mirror, owner = cls(policy.remote, policy), None
        with fail_together(f"checkpoint.remote={policy.remote} cannot be used"):
            if this_rank() == 0:
                owner = mirror._claim(str(Path(run_dir).absolute()))
        if (owner := broadcast_json(owner)) is not None:
            raise ConfigError(
                f"checkpoint.remote={policy.remote}: belongs to the run {owner}; set it to another URL, or run.dir to "
                f"that run's directory, or remove {join(mirror.url, OWNER)} if that run needs its copies no longer"
            )
        return mirror

    @cached_property
    def store(self) -> ObjectStore:
        """The store, opened in the process and at the time of its first use."""
        return ObjectStore(self.url)

    def copies(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints below the URL. Raises StorageError."""
        return list_remote(self.store, self.url)

    def upload(self, path: Path, group: dist.ProcessGroup | None = None) -> str:
        """Copy a published checkpoint, then remove those that the policy does not keep; return its URL. A collective.

        The ranks share the work by files. A copy that exists is kept.

        Args:
            group: Process group of all ranks; None: the default group.

        Raises:
            CheckpointError: On every rank, if one of them could not read or write after all attempts.
        """
        failure = f"checkpoint {path} could not be copied to {self.url}"
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        url, is_copied = "", False
        with fail_together(failure, group):
            if rank == 0:
                existing = self.copies()
                url = self._target(path, existing)
                is_copied = any(each.url == url and each.manifest is not None for each in existing)
        url, is_copied = broadcast_json([url, is_copied], group=group)
        with fail_together(failure, group):
            files = Manifest.read(path).files
            by_size = sorted(files, key=lambda name: files[name].bytes, reverse=True)
            for name in () if is_copied else by_size[rank::world]:
                fault_point("while_copying")
                self.store.upload(path / name, join(url, name))
        with fail_together(failure, group):
            if rank == 0:
                if not is_copied:
                    fault_point("before_remote_manifest")
                    self.store.write(join(url, MANIFEST), (path / MANIFEST).read_bytes())
                    fault_point("after_remote_manifest")
                self._prune(url)
        return url

    def upload_export(self, folders: list[Path]) -> None:
        """Copy exported folders below the URL, by rank 0. A collective. Raises CheckpointError on every rank."""
        with fail_together(f"the export could not be copied to {self.url}"):
            for folder in folders if this_rank() == 0 else ():
                is_adapter = (folder / "adapter_config.json").is_file()
                last = "adapter_config.json" if is_adapter else "config.json"
                upload_folder(self.store, folder, join(self.url, folder.name), last)
        if (repeats := self.repeats()) is not None:
            logger.warning(repeats)

    def repeats(self) -> str | None:
        """Return a line about this rank's failed requests since the last call; None if there were none."""
        return self.store.repeats()

    def _claim(self, run: str) -> str | None:
        """Write which run uses the URL, unless another run does; return that one.

        It counts before its first copy too: each run would remove the other one's copies.
        """
        existing = self.copies()
        self.newest_serial = max((each.manifest.serial for each in existing if each.manifest), default=0)
        try:
            owner = json.loads(self.store.read(join(self.url, OWNER)))["run"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            owner = None
        if owner not in (None, run):
            return str(owner)
        self.store.write(join(self.url, OWNER), json.dumps({"run": run}).encode())
        return None

    def _target(self, path: Path, existing: list[RemoteCheckpoint]) -> str:
        """Return the URL to copy to: that of an equal copy, or one without a manifest, whose objects are removed."""
        manifest, again = Manifest.read(path), 0
        by_name = {each.name: each for each in existing}
        name = path.name
        while (found := by_name.get(name)) is not None and MANIFEST in found.objects and found.manifest != manifest:
            again += 1
            name = f"{path.name.partition('.')[0]}.{again}"
        if found is not None and MANIFEST not in found.objects:
            self.store.remove(each.url for each in found.objects.values())
        return join(self.url, name)

    def _prune(self, newest: str) -> None:
        """Remove complete copies that the policy does not keep, and unfinished ones, which a killed save has left."""
        try:
            found = self.copies()
            complete = [(each, each.manifest) for each in found if each.manifest is not None and each.is_complete]
            reasons = reasons_to_keep([manifest for _, manifest in complete], self._policy)
            removed = [each for (each, _), why in zip(complete, reasons, strict=True) if not why]
            removed += [each for each in found if MANIFEST not in each.objects]
            for each in removed:
                if each.url != newest:
                    names = sorted(each.objects, key=lambda name: name != MANIFEST)
                    self.store.remove(each.objects[name].url for name in names)
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.url, error)

"""Writing of safetensors files of bounded size, and of folders that get their name only once they are complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from components.models.weights.shards import Index
from components.models.weights.weight_sources import INDEX_FILE, SINGLE_FILE, STORED_DTYPES
from components.storage.tensor_files import SafetensorsWriter, TensorEntry

_BLOCK_BYTES = 4 * 1024**2
"""Approximate size of a block that is read, converted and written at a time."""
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_METADATA = {"format": "pt"}
"""Metadata that transformers requires in files of PyTorch weights."""
_OLD = "-old"
_OF_AN_EXPORT = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(adapter_|generation_|tokenizer_)?config\.json"
    r"|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(additional_)?chat_templates?(\.jinja|\.json)?|README\.md"
)
"""Names of files of an earlier export, which the new one replaces even if it has no such file."""


@dataclass(slots=True)
class _File:
    """A planned file: its tensors in the order in which they will be written."""

    tensors: dict[str, torch.Tensor]
    bytes: int = 0


class WeightFiles:
    """Writer of model.safetensors, or of model-N-of-M.safetensors with an index, byte-identical to save_file.

    Names, shapes and the order of the tensors must be given at the start, because the header precedes the values.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
        """Plan the files; nothing is written yet.

        Args:
            tensors: All tensors by name, in the order in which they will be written. Only shapes and dtypes are used,
                so they may be on the meta device.
            shard_bytes: Maximum size of a file without its header; a single larger tensor gets its own file.
        """
        self._folder = folder
        self._files = _split(tensors, shard_bytes)
        self._file_of = {name: index for index, file in enumerate(self._files) for name in file.tensors}
        self._open: tuple[int, BinaryIO, SafetensorsWriter] | None = None
        self._written = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """Write the next tensor, given as blocks along its first dim.

        Raises:
            OSError: The file could not be written.
            ValueError: The blocks do not match the planned shape or dtype.
        """
        planned = self._files[self._file_of[name]].tensors[name]

        def checked() -> Iterator[memoryview]:
            for block in blocks:
                if block.dtype != planned.dtype or block.shape[1:] != planned.shape[1:]:
                    raise ValueError(
                        f"{name}: got a block of shape {tuple(block.shape)}, {block.dtype}; expected blocks of a "
                        f"tensor of shape {tuple(planned.shape)}, {planned.dtype}"
                    )
                yield _bytes_of(block)

        self._writer_of(name).write(name, checked())
        self._written += 1

    def finish(self) -> None:
        """Close the last file and write the index if there are several files. Raises OSError, ValueError."""
        self.close()
        if self._written != len(self._file_of):
            raise ValueError(f"{self._written} tensors were written, but {len(self._file_of)} were planned")
        if len(self._files) > 1:
            weight_map = {name: self._name(index) for name, index in self._file_of.items()}
            body = {"metadata": {"total_size": sum(file.bytes for file in self._files)}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(body, indent=2) + "\n")

    def close(self) -> None:
        """Close the current file, if any."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _name(self, index: int) -> str:
        count = len(self._files)
        return SINGLE_FILE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def _writer_of(self, name: str) -> SafetensorsWriter:
        """Return the writer of a tensor's file; open the file first if it is not the current one."""
        index = self._file_of[name]
        if self._open is None or self._open[0] != index:
            self.close()
            tensors = self._files[index].tensors
            # Mode x: returning to an earlier file fails, because tensors must be written in the planned order.
            file = (self._folder / self._name(index)).open("xb")
            try:
                writer = SafetensorsWriter(file, {each: _entry(tensors[each]) for each in tensors}, _METADATA)
            except BaseException:
                file.close()
                raise
            self._open = (index, file, writer)
        return self._open[2]


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in memory to one file. Raises OSError."""
    with path.open("xb") as file:
        writer = SafetensorsWriter(file, {name: _entry(each) for name, each in tensors.items()}, _METADATA)
        for name, each in tensors.items():
            writer.write(name, [_bytes_of(each)])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes; copied only if they are not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def row_blocks(tensor: torch.Tensor) -> Iterator[Index]:
    """Yield the indices of blocks of rows, about _BLOCK_BYTES each, in which a tensor is read and written."""
    if tensor.ndim == 0:
        yield ()
        return
    rows = max(1, _BLOCK_BYTES // max(1, _size(tensor[:1])))
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    for start in range(0, tensor.shape[0], rows):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)


def _split(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[_File]:
    files: list[_File] = []
    for name, tensor in tensors.items():
        if not files or (files[-1].tensors and files[-1].bytes + _size(tensor) > shard_bytes):
            files.append(_File({}))
        files[-1].tensors[name] = tensor
        files[-1].bytes += _size(tensor)
    return files


def _entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape))


def _size(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


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

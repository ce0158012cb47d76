"""Full, failing and read-only disks made with kernel features: a tmpfs of fixed size, ext4 on a thin device, system
calls that return an error. All but the last need root; without it the test is skipped with that reason."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096
_SYSTEM_CALLS = {"write": 1, "fsync": 74, "rename": 82, "mkdir": 83, "open": 257, "remove": 263}  # of x86-64
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_LARGE = 600  # a write of at least this many bytes is assumed to go to a file; pipes and sockets write less here


class Disk:
    """A tmpfs of fixed size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / ".filler"

    def free(self) -> int:
        """Return the number of free bytes."""
        return shutil.disk_usage(self.folder).free

    def fill(self, leave: int = 0) -> None:
        """Fill the disk up to `leave` free bytes, in full pages."""
        self.empty()
        with self._filler.open("wb") as filler:
            for _ in range(1000):
                missing = self.free() - leave
                if missing <= 0:
                    return
                try:
                    os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, missing)
                except OSError as error:
                    if error.errno != errno.ENOSPC:  # else another process has used some of these bytes in the meantime
                        raise
        raise AssertionError(f"{self.folder} still has {self.free()} free bytes")

    def empty(self) -> None:
        """Remove the file that fills the disk."""
        self._filler.unlink(missing_ok=True)

    def remount(self, options: str) -> bool:
        """Remount with `ro`, `rw` or `size=...`; return False on failure (`ro` while a file is open for writing)."""
        done = subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=False, capture_output=True)
        return done.returncode == 0


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    """Mount a tmpfs of `size` on `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)])
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def thin_disk(folder: Path, backing_size: str) -> Iterator[Disk]:
    """Mount an ext4 file system of nominally 16 MiB on `folder`; yield the smaller disk that backs it.

    Once the backing disk is full, writes succeed and fsync fails.
    """
    with small_disk(folder.with_name(f"{folder.name}.backing"), backing_size) as backing:
        image = backing.folder / "image"
        with image.open("wb") as file:
            file.truncate(16 * 2**20)
        made = subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=False, capture_output=True)
        if made.returncode:
            pytest.skip(f"needs mkfs.ext4: {made.stderr.decode().strip()}")
        folder.mkdir()
        _mount(["mount", "-o", "loop", str(image), str(folder)])
        try:
            yield backing
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _mount(command: list[str]) -> None:
    if os.geteuid():
        pytest.skip("needs root to mount a disk")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


def fail_from_now_on(call: str) -> None:
    """Install a seccomp filter that makes a system call return EIO for the rest of this process.

    write: only of 600 bytes or more. open: only for writing. The others: always.
    """
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of system calls here are those of x86-64")
    number = struct.pack("HBBI", _LOAD, 0, 0, 0)
    argument = struct.pack("HBBI", _LOAD, 0, 0, 16 + 8 * 2)  # lower 32 bits of the third argument
    matches = struct.pack("HBBI", _EQUAL, 0, 3, _SYSTEM_CALLS[call])
    condition = {
        "write": struct.pack("HBBI", _AT_LEAST, 0, 1, _LARGE),
        "open": struct.pack("HBBI", _ANY_BIT, 0, 1, os.O_WRONLY | os.O_RDWR),
    }.get(call, struct.pack("HBBI", _AT_LEAST, 0, 1, 0))
    fails = struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | errno.EIO)
    allows = struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    program = number + matches + argument + condition + fails + allows
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, filters)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")

"""Atomic writes: files are written in a scratch folder beside their target, and renamed.

The writer holds a lock (flock) on the folder, which ends with the process. So the next writer of the file can find
abandoned folders, and removes them. The library that writes may make temporary files in the folder.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENDING = ".unfinished"


def write_atomically(path: str | os.PathLike, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a new file, then rename that file to `path`.

    An existing file is kept until the new one is complete, which gets its permissions; for a link, the target is
    replaced. Raises the errors of `write`, and OSError, which names `path`, where it cannot be written or is not a
    file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path}: expected a file, or a path where nothing is yet")
    with errors_naming(path), scratch_folder(target) as scratch:
        file = scratch / target.name
        file.touch()
        mode = stat.S_IMODE((target if target.exists() else file).stat().st_mode)
        write(file)
        if stat.S_IMODE(file.stat().st_mode) != mode:
            file.chmod(mode)
        os.replace(file, target)


@contextmanager
def scratch_folder(target: Path, undo: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """A new folder beside a target, removed at the end. Abandoned ones are removed first, after `undo`."""
    _remove_abandoned(target, undo)
    folder, lock = _made(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(target: Path) -> tuple[Path, int]:
    """A new scratch folder, and the descriptor that holds its lock."""
    while True:
        folder = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_ENDING}")
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # on a file system without locks, nobody removes another writer's folder
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)  # another writer removed the folder as abandoned before it was locked


def _remove_abandoned(target: Path, undo: Callable[[Path], object] | None) -> None:
    for folder in _scratch_folders(target):
        with suppress(OSError):  # locked, or of another user, or another writer has just removed it
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if undo is not None:
                    undo(folder)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _scratch_folders(target: Path) -> list[Path]:
    """The scratch folders of a target, also of running processes; none where the folder cannot be listed."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}{re.escape(_ENDING)}")
    try:
        return [target.with_name(found) for found in os.listdir(target.parent) if name.fullmatch(found)]
    except OSError:
        return []


@contextmanager
def errors_naming(path: str | os.PathLike) -> Iterator[None]:
    """Let errors of the operating system that name no file, or a file in a scratch folder, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and _ENDING not in os.fsdecode(error.filename)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error

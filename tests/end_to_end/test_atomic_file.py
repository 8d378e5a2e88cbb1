"""Files that are written by rename: whole or not at all, and nothing of a killed writer stays for long."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from fp4compile.recipe import atomic_file
from fp4compile.recipe.atomic_file import scratch_folder, write_atomically

# Writes half of a file, says so, and waits to be killed or, after a line of input, goes on. The module is run without
# its package, which takes seconds to import.
WRITER = """
import runpy
import sys

def write(file):
    file.write_text("half")
    print(file, flush=True)
    sys.stdin.readline()
    file.write_text("of the other process")

runpy.run_path(sys.argv[1])["write_atomically"](sys.argv[2], write)
"""


def writer_of(path):
    command = [sys.executable, "-c", WRITER, atomic_file.__file__, path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return process, process.stdout.readline().decode().strip()


def write(path, text="new"):
    write_atomically(path, lambda file: file.write_text(text))


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    path, other = tmp_path / "a.toml", tmp_path / "a.toml.b"
    process, left = writer_of(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.path.exists(left) and not path.exists()
    write(other)  # not its own
    assert os.path.exists(left)
    write(path)
    assert sorted(os.listdir(tmp_path)) == ["a.toml", "a.toml.b"] and path.read_text() == "new"


def test_a_writer_leaves_alone_what_another_is_writing(tmp_path):
    path = tmp_path / "a.toml"
    process, unfinished = writer_of(path)
    write(path)
    assert os.path.exists(unfinished) and path.read_text() == "new"
    process.communicate(b"\n")
    assert process.returncode == 0 and path.read_text() == "of the other process"
    assert os.listdir(tmp_path) == ["a.toml"]


def test_writers_at_the_same_time(tmp_path):
    """Threads lock as processes do."""
    path, failed, texts = tmp_path / "file", [], [str(i) * 1000 for i in range(8)]

    def many(text):
        try:
            for _ in range(20):
                write(path, text)
                assert path.read_text() in texts
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=many, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and os.listdir(tmp_path) == ["file"]


def test_a_folder_that_was_taken_for_abandoned_is_made_anew(tmp_path, monkeypatch):
    """Another writer comes between making the folder and locking it."""
    made, mkdir = [], type(tmp_path).mkdir

    def removed_at_first(folder, mode):
        made.append(folder)
        mkdir(folder, mode)
        if len(made) == 1:
            folder.rmdir()

    monkeypatch.setattr(type(tmp_path), "mkdir", removed_at_first)
    write(tmp_path / "file")
    assert len(set(made)) == 2 and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("bad"), OSError(errno.ENOSPC, "No space left")])
def test_a_failure_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write_text("half of it")
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        write_atomically(path, fail)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    if isinstance(error, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_errors_name_the_file(tmp_path):
    for path in (tmp_path / "absent" / "file", tmp_path):
        with pytest.raises(OSError) as caught:
            write(path)
        assert str(path) in str(caught.value) and "unfinished" not in str(caught.value)
    with pytest.raises(OSError, match="/dev/null"):
        write("/dev/null")  # it is no file: root would replace it
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file", "elsewhere")
    with pytest.raises(FileNotFoundError) as other, scratch_folder(tmp_path / "x"):
        write_atomically(tmp_path / "y", lambda file: (_ for _ in ()).throw(elsewhere))
    assert other.value is elsewhere and os.listdir(tmp_path) == []


def test_permissions_are_those_of_the_old_file_or_of_a_new_one(tmp_path):
    path, plain = tmp_path / "file", tmp_path / "plain"
    plain.touch()

    def private(file):
        file.unlink()
        os.close(os.open(file, os.O_CREAT, 0o600))

    for old in (None, 0o640, 0o444):
        if old is not None:
            path.chmod(old)
        write_atomically(path, private)
        expected = stat.S_IMODE(plain.stat().st_mode) if old is None else old
        assert stat.S_IMODE(path.stat().st_mode) == expected


def test_links_stay_and_folders_of_other_names_too(tmp_path):
    (tmp_path / "store").mkdir()
    link, file = tmp_path / "link", tmp_path / "store" / "file"
    link.symlink_to(file)
    kept = [".file.0.unfinished", f".file.{'0' * 16}.tmp", f"file.{'0' * 16}.unfinished"]
    for name in kept:
        (tmp_path / "store" / name).mkdir()
    write(link)
    assert link.is_symlink() and sorted(os.listdir(file.parent)) == sorted([*kept, "file"])
    assert file.read_text() == "new"

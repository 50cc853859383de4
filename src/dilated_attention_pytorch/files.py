"""Files that appear whole or not at all, survive a power cut, and are compared with their checksums when they are read.

The checksums of a folder are one small file in it, `checksums.txt`: one line per file with CRC-32, size and name, after
a first line that is the CRC-32 of the rest. They detect damage, not tampering.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import shutil
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CHECKSUMS = "checksums.txt"
_CHUNK = 1 << 22  # bytes that are read at a time
_NEXT_TO_NOTHING = 1 << 16  # bytes; some file systems never hand out their last block


class DamagedFile(ValueError):
    """A file does not hold what was written into it."""


class Checksum(NamedTuple):
    crc: int
    bytes: int


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file beside `path`, then rename it: no reader sees half a file. A callable writes the file itself."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("ab") as stream:
            mode = os.fstat(stream.fileno()).st_mode
        if callable(content):
            content(partial)
        else:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        if partial.stat().st_mode != mode:  # safetensors creates a file that only its owner can read
            partial.chmod(mode & 0o7777)
        os.replace(partial, path)
        sync_folder(path.parent)
    except Exception as error:
        # Asked before the partial file is removed, which makes room again. Some writers do not say why they failed.
        if is_full(path.parent, error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def sweep_partials(folder: Path) -> None:
    """Remove the partial files that killed processes left behind. No other process may be writing in the folder."""
    for partial in folder.glob(".*.partial"):
        if partial.is_file() and not partial.name.endswith(f".{os.getpid()}.partial"):
            partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make files that were created or renamed in a folder survive a power cut under their names."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def is_full(folder: Path, error: BaseException | None) -> bool:
    """Whether writing into `folder` failed with `error` because its disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return free_bytes(folder) < _NEXT_TO_NOTHING


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(next(known for known in (folder, *folder.parents) if known.exists())).free


def json_line(values: Mapping[str, Any]) -> str:
    """Values as one line of JSON; numbers that are not finite become `null`.

    >>> json_line({"step": 1, "loss": float("nan"), "branch_bytes": {"w64 r1": 0}, "means": (1.0, float("inf"))})
    '{"step": 1, "loss": null, "branch_bytes": {"w64 r1": 0}, "means": [1.0, null]}\\n'
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(values), allow_nan=False) + "\n"


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a TOML file; errors call it `what`."""
    try:
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"before Python 3.11, reading a {what} needs tomli: pip install tomli") from error
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no {what} {path}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None


def sum_files(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    """The checksums of files in a folder, by name."""
    return {name: deque(_summing(folder / name), maxlen=1)[0] for name in names}


def write_checksums(path: Path, sums: Mapping[str, Checksum]) -> None:
    lines = "".join(f"{one.crc:08x} {one.bytes} {name}\n" for name, one in sorted(sums.items())).encode()
    write_whole(path, b"%08x\n%b" % (zlib.crc32(lines), lines))


def read_checksums(path: Path) -> dict[str, Checksum]:
    """What `write_checksums` wrote."""
    content = path.read_bytes()
    try:
        own, lines = content.split(b"\n", 1)
        if own != b"%08x" % zlib.crc32(lines):
            raise ValueError("its own checksum differs")
        rows = [line.split(" ", 2) for line in lines.decode().splitlines()]
        return {name: Checksum(int(crc, 16), int(size)) for crc, size, name in rows}
    except ValueError as error:
        raise DamagedFile(f"{path.name} is broken or truncated ({error})") from None


def checking(folder: Path, sums: Mapping[str, Checksum]) -> Iterator[int]:
    """Compare files with their checksums. Yields the number of bytes of each read; a difference is a `DamagedFile`."""
    for name, noted in sums.items():
        path = folder / name
        if not path.is_file():
            raise DamagedFile(f"{name} is missing")
        size = path.stat().st_size
        if size != noted.bytes:
            raise DamagedFile(f"{name} is broken or truncated (it has {size:,} bytes, {noted.bytes:,} were written)")
        found = Checksum(0, 0)
        for read in _summing(path):
            yield read.bytes - found.bytes
            found = read
        if found != noted:
            raise DamagedFile(f"{name} is broken (its checksum is {found.crc:08x}, {noted.crc:08x} was written)")


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Compare the files of these names that exist in a folder with its checksums, if it has any."""
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        known = read_checksums(folder / CHECKSUMS)
        there = [name for name in names if name in known and (folder / name).is_file()]
        deque(checking(folder, {name: known[name] for name in there}), maxlen=0)
    except DamagedFile as damage:
        raise DamagedFile(f"{folder}: {damage}") from None


def _summing(path: Path) -> Iterator[Checksum]:
    """Yields, after each read, the checksum of the file so far; the last one is that of the whole file."""
    found, buffer = Checksum(0, 0), memoryview(bytearray(_CHUNK))
    yield found
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            found = Checksum(zlib.crc32(buffer[:count], found.crc), found.bytes + count)
            yield found

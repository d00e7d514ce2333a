"""Archive files, compressed according to the suffix of their names."""

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

import click
import zstandard

from server.archive.file import LINE_LIMIT_BYTES
from server.conversation.errors import ArchiveInvalid

PIPE: Final = "-"
_PART: Final = ".part"
_UNREADABLE: Final = (gzip.BadGzipFile, EOFError, zstandard.ZstdError)


@contextmanager
def writing(name: str) -> Iterator[IO[bytes]]:
    """Open a file to write, or standard output. The file gets its name only when it is complete."""
    if name == PIPE:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file, _compressing(file, path.suffix) as stream:
            yield stream
        part.replace(path)
    except OSError as error:
        raise click.ClickException(f"{name} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. At most one byte more than the maximum line length of an archive is read at once."""
    with path.open("rb") as file, _decompressing(file, path.suffix) as stream:
        try:
            while line := stream.readline(LINE_LIMIT_BYTES + 1):
                yield line
        except _UNREADABLE as error:
            raise ArchiveInvalid(f"{path.name} is truncated, or its compression does not match its name.") from error


@contextmanager
def _compressing(file: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    match suffix:
        case ".gz":
            # Without a timestamp, so that the same conversations give the same bytes.
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as stream:
                yield cast("IO[bytes]", stream)
        case ".zst":
            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
                yield cast("IO[bytes]", stream)
        case _:
            yield file


@contextmanager
def _decompressing(file: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    match suffix:
        case ".gz":
            with gzip.GzipFile(fileobj=file) as stream:
                yield cast("IO[bytes]", stream)
        case ".zst":
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as stream:
                yield io.BufferedReader(stream)
        case _:
            yield file

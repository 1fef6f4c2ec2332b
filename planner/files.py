"""The library's only file input and output: reading with checks, writing aside and renaming."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from planner.errors import InputError

MAX_LINE_BYTES = 4 * 2**20
MAX_YAML_BYTES = 16 * 2**20


def repository_dir(name: str) -> Path:
    """The folder `name` (catalogs, examples) of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parent
    checkout, installed = package.parent / name, package / f"_{name}"
    return installed if installed.is_dir() else checkout


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacking .gz, with one clear line for whatever is not a readable file."""
    if path.is_dir():
        raise InputError(f"{path}: is a directory, expected a file")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to read it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: is not a whole gzip file; pack it again or drop the .gz ending") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedReader]:
    """Open UTF-8 text as a stream of bytes, without its byte order mark.

    Binary content and a line longer than MAX_LINE_BYTES are refused while they are read, so a line of 2 GB
    costs no more memory than one that is just too long.
    """
    with open_input(path) as stream:
        yield io.BufferedReader(_TextBytes(path, stream), 2**20)


class _TextBytes(io.RawIOBase):
    """Passes the bytes of `stream` on, block by block, once they are checked."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.lines, self.open_line_bytes, self.is_first = 0, 0, True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(min(len(buffer), 2**20))
        if self.is_first:
            block, self.is_first = block.removeprefix(codecs.BOM_UTF8), False
        self._check(block)
        buffer[: len(block)] = block
        return len(block)

    def _check(self, block: bytes) -> None:
        hint = "expected text (pack it as .gz if it is compressed)"
        if (at := block.find(b"\0")) >= 0:
            line = self.lines + block.count(b"\n", 0, at) + 1
            raise InputError(f"{self.path}, line {line}: holds a NUL byte, so it is binary; {hint}")
        try:
            self.decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self.lines + block.count(b"\n", 0, error.start) + 1
            raise InputError(f"{self.path}, line {line}: is not UTF-8; {hint}") from None
        newline = block.find(b"\n")
        if self.open_line_bytes + (newline if newline >= 0 else len(block)) > MAX_LINE_BYTES:
            raise InputError(
                f"{self.path}, line {self.lines + 1}: is longer than {MAX_LINE_BYTES // 2**20} MiB; "
                "expected one request per line"
            )
        if newline >= 0:
            self.open_line_bytes = len(block) - block.rfind(b"\n") - 1
        else:
            self.open_line_bytes += len(block)
        self.lines += block.count(b"\n")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping."""
    with open_input(path) as stream:
        raw = stream.read(MAX_YAML_BYTES + 1)
    if len(raw) > MAX_YAML_BYTES:
        raise InputError(f"{path}: is larger than {MAX_YAML_BYTES // 2**20} MiB, which no YAML of ours is")
    try:
        document = yaml.load(raw.decode("utf-8-sig"), Loader=_Loader)
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; expected a YAML file") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{place}: is not valid YAML ({_first_line(error)})") from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"{path}: the top level is {kind}, expected a mapping of keys to values")
    return document


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _first_line(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return str(problem)


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the order given, short lists of numbers on one line."""


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, int | float) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


def to_yaml(document: Mapping[str, Any]) -> str:
    """YAML text, the same bytes for the same document."""
    return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def write_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Write all `files` (relative path -> content) into `directory`, or none of them.

    Everything is written aside first and then renamed into place, so an interrupted run leaves no half file.
    """
    check_output_directory(directory)
    aside: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        for name, content in files.items():
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())
        for name in files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(aside / name, directory / name)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file whole or not at all."""
    write_files(path.parent, {path.name: content})


def check_output_directory(directory: Path) -> None:
    """Refuse a place that `write_files` could not write to, before hours of work rather than after."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: exists and is not a directory; name another one with -o")
    existing = directory
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"{directory}: {existing} is not a directory; name another one with -o")
    if not os.access(existing, os.W_OK):
        raise InputError(f"{directory}: no permission to write in {existing}; name another one with -o")

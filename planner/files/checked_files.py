"""Reads and checks files of users, and writes files: to a temporary folder, then renamed into place, so that
a killed run leaves no half-written file.
"""

import codecs
import csv
import fcntl
import gzip
import io
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from planner.errors import InputError
from planner.files import interrupts
from planner.files.jsontext import MOST_DIGITS, is_text, parse_json

# Limits on what is read: no proper input is larger, and reading it all before refusing it would take memory.
YAML_SUFFIXES = (".yaml", ".yml", ".json")  # How the name of a file with YAML ends.
MAX_LINE_BYTES = 4 * 2**20  # The longest line of text: one request with its prompt.
MAX_DOCUMENT_BYTES = 256 * 2**20  # The longest line that holds a whole JSON document.
MAX_JSON_BYTES = 16 * 2**20
MAX_YAML_BYTES = 16 * 2**20
MAX_YAML_DEPTH = 64  # The parser is recursive, and a stack overflow would kill the process.
BLOCK_BYTES = 2**20  # Text is read and checked in blocks of at most this size.
TEMPORARY_PREFIX = ".fleetplan-"  # Names of temporary folders begin like this.
ABANDONED_S = 60.0  # Every unlocked temporary folder that is older was left by a killed run.
MAX_YAML_VALUES = 200_000  # With aliases expanded.
# MAX_LINE_BYTES limits fields too. Python's own limit, 128 KiB, would refuse logs with long prompts.
csv.field_size_limit(2**31 - 1)
_OUTPUT_FOLDERS: set[Path] = set()  # Folders that passed `check_output_directory`: they were no links.


def repository_dir(name: str) -> Path:
    """The folder `name` (catalogs, examples) of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout, installed = package.parent / name, package / f"_{name}"
    return installed if installed.is_dir() else checkout


def package_text(name: str) -> str:
    """A text file in the package, such as reports/page.css."""
    return (Path(__file__).parents[1] / name).read_text(encoding="utf-8")


def user_cache() -> Path | None:
    """Fleetplan's folder in the user's cache; None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetplan"
    except RuntimeError:
        return None


def cached_text(name: str, make: Callable[[], str]) -> str:
    """The result of `make`, cached under `name` in the user's cache if there is one.

    `name` must change with everything that the text depends on: a cached text is never checked.
    """
    if (folder := user_cache()) is None:
        return make()
    file = folder / name
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    text = make()
    with suppress(InputError):
        write_file(file, text)
    return text


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacking .gz; raises InputError if it is no readable file."""
    if os.path.isdir(path):  # noqa: PTH112 - unlike Path.is_dir, silent about names that no file can have
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
def open_text(path: Path, *, long_lines: tuple[bytes, ...] = ()) -> Iterator[io.BufferedReader]:
    """Open UTF-8 text as a stream of bytes, without its byte order mark.

    Binary content and lines longer than MAX_LINE_BYTES are refused while they are read, so a line of 2 GB
    never fills the memory. A file that begins with one of `long_lines` may have lines up to
    MAX_DOCUMENT_BYTES.
    """
    with open_input(path) as stream:
        yield io.BufferedReader(_TextBytes(path, stream, long_lines), BLOCK_BYTES)


# First bytes of files that users give in place of text -> the error. A workbook of Excel is a ZIP archive.
OTHER_FORMATS = {
    b"PK\x03\x04": "is a ZIP archive or a workbook; unpack it, or save it as CSV",
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "is UTF-16; save it as UTF-8"),
}


class _TextBytes(io.RawIOBase):
    """The bytes of `stream`, each block checked as it is read."""

    def __init__(self, path: Path, stream: BinaryIO, long_lines: tuple[bytes, ...]) -> None:
        self.path, self.stream, self.long_lines = path, stream, long_lines
        self.longest_bytes = MAX_LINE_BYTES
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.is_first = True  # The next block is the first.
        self.lines = 0  # Whole lines so far.
        self.open_line_bytes = 0  # Bytes read so far of the line after the whole ones.

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(min(len(buffer), BLOCK_BYTES))
        if self.is_first:
            block, self.is_first = block.removeprefix(codecs.BOM_UTF8), False
            for beginning, advice in OTHER_FORMATS.items():
                if block.startswith(beginning):
                    raise InputError(f"{self.path}: {advice}")
            # Without its first four spaces `{ "a"` begins like `{"a"`.
            if self.long_lines and block.lstrip().replace(b" ", b"", 4).startswith(self.long_lines):
                self.longest_bytes = MAX_DOCUMENT_BYTES
        self._check_block(block)
        buffer[: len(block)] = block
        return len(block)

    def _check_block(self, block: bytes) -> None:
        """Refuse binary content, text that is not UTF-8, and lines too long, also across block borders."""
        hint = "expected text (pack it as .gz if it is compressed)"
        if (position := block.find(b"\0")) >= 0:
            line = self.lines + block.count(b"\n", 0, position) + 1
            raise InputError(f"{self.path}, line {line}: holds a NUL byte, so it is binary; {hint}")
        try:
            self.decoder.decode(block, final=not block)  # An empty block is the end of the file.
        except UnicodeDecodeError as error:
            # `error.object` may begin with bytes of the block before; no line ends in them.
            line = self.lines + error.object.count(b"\n", 0, error.start) + 1
            byte = f"0x{error.object[error.start]:02X}"
            raise InputError(
                f"{self.path}, line {line}: is not UTF-8 (byte {byte}); {hint}, or convert it: "
                f"iconv -f cp1252 -t utf-8 {self.path.name} > utf8{self.path.suffix}"
            ) from None
        # Only the first line of a block can be too long: a block is shorter than the shortest limit.
        newline = block.find(b"\n")
        if self.open_line_bytes + (newline if newline >= 0 else len(block)) > self.longest_bytes:
            raise InputError(
                f"{self.path}, line {self.lines + 1}: is longer than {self.longest_bytes // 2**20} MiB; "
                "expected one request per line"
            )
        if newline >= 0:
            self.open_line_bytes = len(block) - block.rfind(b"\n") - 1
        else:
            self.open_line_bytes += len(block)
        self.lines += block.count(b"\n")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping."""
    with open_input(path) as stream:
        raw = stream.read(MAX_YAML_BYTES + 1)
    if len(raw) > MAX_YAML_BYTES:
        raise InputError(f"{path}: is larger than {MAX_YAML_BYTES // 2**20} MiB, which no YAML of ours is")
    try:
        text = raw.decode("utf-8-sig")
        _check_yaml(text)
        document = yaml.load(text, Loader=_Loader)
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; expected a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        if "another document" in str(error):
            several = "is several YAML documents, as manifests are; expected one, such as a fleet.yaml"
            raise InputError(f"{path}{place}: {several}") from None
        raise InputError(f"{path}{place}: is not valid YAML ({_first_line(error)})") from None
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"{path}: the top level is {kind}, expected a mapping of keys to values")
    return document


def yaml_value(text: str) -> Any:
    """Parse one YAML value; raises InputError if `text` is not one."""
    try:
        _check_yaml(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{text!r} is no value that YAML can read ({_first_line(error)})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; jsontext.py says what is refused."""
    with open_text(path, long_lines=(b"{",)) as stream:  # Programs write an object without line breaks.
        raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise InputError(f"{path}: is larger than {MAX_JSON_BYTES // 2**20} MiB, which no JSON of ours is")
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: the top level is a {type(document).__name__}, expected an object")
    return document


_TAG = "tag:yaml.org,2002:"  # The beginning of the tags of YAML's own types.
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge")
_TAGS = {f"{_TAG}{name}" for name in _KINDS}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML of mappings, lists and plain values alone: other types (!!set, !!binary, !!omap) are refused,
    and so are values that Python cannot hold and a key given twice, of which PyYAML would keep the last.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            kind = f"!!{node.tag.removeprefix(_TAG)}" if node.tag.startswith(_TAG) else node.tag
            problem = f"expected a mapping, a list, text, a number, true or false, found {kind}"
            raise _malformed_error(problem, node.start_mark)
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError):
            value = None  # Unreadable, such as 2023-13-45, !!int x or !!bool x; refused below.
        else:
            if isinstance(node, yaml.ScalarNode) and (advice := _explain_misread(node, value)):
                raise _malformed_error(advice, node.start_mark)
            is_storable = is_text(value) if isinstance(value, str) else True
            if is_storable and not (isinstance(value, int) and abs(value) >= 10**MOST_DIGITS):
                return value
        problem = f"{str(node.value)[:40]!a} is no {node.tag.rpartition(':')[2]} that can be read"
        raise _malformed_error(problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen and key != "<<":  # Merge keys are counted below.
                raise _malformed_error(f"the key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        for (_, value_node), (key_node, empty) in itertools.pairwise(node.value if node.flow_style else ()):
            if written := _split_number(value_node, key_node, empty):
                raise _malformed_error(
                    f"the comma in {written!r} ends an entry; write a decimal point, and no commas between "
                    "thousands",
                    value_node.start_mark,
                )
        own_keys = [key_node for key_node, _ in node.value if key_node.tag != f"{_TAG}merge"]
        if len(node.value) - len(own_keys) > 1:
            raise _malformed_error("the key '<<' is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if all(key_node.tag == f"{_TAG}str" for key_node in own_keys):
            return mapping  # Only equal texts are equal keys, and these were refused above.
        keys = [self.construct_object(key_node, deep=True) for key_node in own_keys]
        if len(set(keys)) < len(keys):  # The same value, written in two ways: 1 and 0x1.
            twice = next(key for key in keys if keys.count(key) > 1)
            mark = own_keys[len(keys) - 1 - keys[::-1].index(twice)].start_mark
            raise _malformed_error(f"the key {twice!r} is given twice", mark)
        return mapping


def _split_number(before: yaml.Node, key: yaml.Node, value: yaml.Node) -> str:
    """The number that a decimal comma has split between two entries of a flow mapping, else empty: in
    `{price: 2,10 usd/h}` the first entry has the value 2, the next entry the key "10 usd/h" and no value.
    """
    scalars = [node for node in (before, key, value) if isinstance(node, yaml.ScalarNode) and not node.style]
    if len(scalars) < 3 or value.value or not re.fullmatch(r"[+-]?\d+", before.value):
        return ""
    is_next = key.start_mark.index == before.end_mark.index + 1  # No space follows the comma.
    return f"{before.value},{key.value}" if is_next and key.value[:1].isdigit() else ""


def _explain_misread(node: yaml.ScalarNode, value: object) -> str:
    """The advice for a number that YAML 1.1 reads unlike people (010 as 8, 1:30 as 90); empty for others."""
    written = str(node.value)
    if not isinstance(value, int | float) or isinstance(value, bool) or node.style:  # With quotes: text.
        return ""
    if ":" in written:
        return f"{written!r} would be read as {value}; write the number, or a time with its unit"
    digits = written.lstrip("+-").replace("_", "")
    if isinstance(value, int) and len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return f"{written!r} would be read as the octal number {value}; write {digits.lstrip('0') or 0}"
    return ""


def _check_yaml(text: str) -> None:
    """Refuse YAML that is nested too deep, or grows too large once its aliases are written out.

    `sizes` and `anchors` are stacks, with an entry per open collection; a size is a number of plain values.
    """
    sizes: list[int] = [0]
    anchors: list[str | None] = [None]
    size_by_anchor: dict[str | None, int] = {}  # Sizes of the closed collections, by anchor.
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(0)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = sizes.pop(), anchors.pop()
            sizes[-1] += size
            size_by_anchor[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors:
                raise _malformed_error(f"*{event.anchor} refers to what it is a part of", event.start_mark)
            # Plain values are not in `size_by_anchor` and count 1; empty collections count 1 too.
            sizes[-1] += max(size_by_anchor.get(event.anchor, 1), 1)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
        if len(sizes) > MAX_YAML_DEPTH:
            raise _malformed_error(f"nested deeper than {MAX_YAML_DEPTH} levels", event.start_mark)
        if sizes[-1] > MAX_YAML_VALUES:
            problem = f"more than {MAX_YAML_VALUES} values, with aliases written out"
            raise _malformed_error(problem, event.start_mark)


def _malformed_error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    """The error at a mark of PyYAML's parser in C or of that in Python."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _first_line(error: Exception) -> str:
    """The error's message without the place and the excerpt, which PyYAML adds in further lines."""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return str(problem)


class _Layout:
    """How we write YAML: block style, keys in the order given, lists of numbers on one line, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Dumper(_Layout, yaml.SafeDumper):
    pass


class _FastDumper(_Layout, getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """libyaml's dumper, eight times as fast, where PyYAML has it.

    It refuses lone surrogates, by which Python represents undecodable bytes in names of files.
    """


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    """A list of numbers on one line, any other list with a line per item."""
    has_only_numbers = all(isinstance(item, int | float) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=has_only_numbers)


# PyYAML (YAML 1.1) reads these as text, but YAML 1.2 or Go readers take them for numbers or booleans.
_AMBIGUOUS = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+|[yYnN]", re.ASCII)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Text with several lines as a block; quotes around text that other readers would misread."""
    style = "|" if "\n" in text else None
    if _AMBIGUOUS.fullmatch(text):
        style = "'"
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


for _dumper in (_Dumper, _FastDumper):
    _dumper.add_representer(list, _represent_list)
    _dumper.add_representer(str, _represent_str)


def to_yaml(document: Mapping[str, Any]) -> str:
    """YAML text, the same bytes for the same document."""
    options: Any = {"sort_keys": False, "width": 100, "allow_unicode": True}
    try:
        return str(yaml.dump(dict(document), Dumper=_FastDumper, **options))
    except UnicodeEncodeError:
        return str(yaml.dump(dict(document), Dumper=_Dumper, **options))


def csv_text(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A CSV file with these column names and rows, as text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((head, *rows))
    return text.getvalue()


def write_files(directory: Path, files: Mapping[str, str | bytes], *, outdated: Collection[str] = ()) -> None:
    """Write all `files` (relative path -> content) into `directory`, or none of them.

    Files are written to a temporary folder and then renamed into place; if that fails, the former files are
    restored. `outdated` are patterns of files that an earlier run may have left: those not written now are
    removed. Neither `directory` nor a folder in it may be a link.
    """
    check_output_directory(directory)
    _write_files(directory, files, outdated)


def _write_files(directory: Path, files: Mapping[str, str | bytes], outdated: Collection[str] = ()) -> None:
    """`write_files` into a folder that was checked already."""
    for folder in sorted({directory / parent for name in files for parent in Path(name).parents[:-1]}):
        _refuse_link(folder)
    made_folders: list[Path] = []
    try:
        _make_folder(directory, made_folders)
        # Inside `directory`, because that may be a mount of its own or the only writable place.
        with _temporary_folder(directory) as temporary:
            new, old = temporary / "new", temporary / "old"
            for name, content in files.items():
                target = new / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content if isinstance(content, bytes) else _encode_text(content))
            # Outdated files in a linked folder stay: the folder may belong to others.
            leftovers = {
                str(path.relative_to(directory))
                for pattern in outdated
                for path in directory.glob(pattern)
                if path.parent == directory or not path.parent.is_symlink()
            }
            _swap_files(directory, new, old, list(files), sorted(leftovers - set(files)), made_folders)
    except BaseException as error:
        for folder in reversed(made_folders):
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None
        raise


@contextmanager
def _temporary_folder(directory: Path) -> Iterator[Path]:
    """Make a temporary folder, locked while it is in use. Folders that killed runs have left are removed."""
    for abandoned in directory.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            if abandoned.stat().st_mtime < time.time() - ABANDONED_S:
                with _lock_folder(abandoned) as is_free:
                    if is_free:
                        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=directory))
    try:
        with _lock_folder(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock_folder(directory: Path) -> Iterator[bool]:
    """Lock a folder; yields False if another process has locked it. A lock ends with its process.

    If the file system has no locks, or the folder cannot be read, it yields True without a lock.
    """
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(opened)


@contextmanager
def reserve_folder(directory: Path) -> Iterator[None]:
    """Lock a folder for one run, so that no other run writes into it at the same time.

    The folder is made if it is missing, and then removed at the end if it is empty. Raises InputError as
    `check_output_directory` does, and if another run has locked the folder.
    """
    check_output_directory(directory)
    made_folders: list[Path] = []

    def remove_if_empty() -> None:
        for folder in reversed(made_folders):
            with suppress(OSError):
                folder.rmdir()

    with interrupts.tidy_at_end(remove_if_empty):
        try:
            _make_folder(directory, made_folders)
        except OSError as error:
            raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None
        with _lock_folder(directory) as is_free:
            if not is_free:
                raise InputError(
                    f"{directory}: another run is writing into it; wait for its end, or name another folder"
                )
            yield


def _encode_text(text: str) -> bytes:
    """UTF-8. Undecodable bytes of file names, which Python represents by lone surrogates, become \\udcff."""
    return text.encode(errors="backslashreplace")


def _swap_files(
    directory: Path, new: Path, old: Path, names: list[str], leftovers: list[str], made_folders: list[Path]
) -> None:
    """Rename the files `names` from `new` into `directory`; move the files they replace, and `leftovers`, to
    `old`. Folders that are made join `made_folders`.

    An error undoes all renames. A file stays in its place until its successor is renamed over it, so that a
    killed run leaves either the former file or the new one.
    """
    undo: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        """Rename a file, and note it in `undo`."""
        if target.is_dir():
            raise IsADirectoryError(0, f"{target} is a directory")  # Users see this text alone.
        source.replace(target)
        undo.append((source, target))

    try:
        for name in (*names, *leftovers):
            _make_folder((directory / name).parent, made_folders)
            if os.path.lexists(directory / name):
                if (directory / name).is_dir():
                    raise IsADirectoryError(0, f"{name} is a directory there")
                (old / name).parent.mkdir(parents=True, exist_ok=True)
                if name in names and _link_file(directory / name, old / name):
                    undo.append((directory / name, old / name))
                else:
                    move(directory / name, old / name)
            if name in names:
                move(new / name, directory / name)
    except BaseException:
        for source, target in reversed(undo):
            target.replace(source)
        raise


def _link_file(path: Path, other: Path) -> bool:
    """Hard-link a file as `other`; False if the file system has no hard links."""
    try:
        os.link(path, other, follow_symlinks=False)
    except (OSError, NotImplementedError):
        return False
    return True


def _make_folder(directory: Path, made_folders: list[Path]) -> None:
    """Make `directory` and its parents, and add those that were missing to `made_folders`."""
    if not directory.is_dir():
        _make_folder(directory.parent, made_folders)
        directory.mkdir()
        made_folders.append(directory)


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file whole or not at all; a pipe or a device such as /dev/stdout is written to directly.

    Text is compressed if the file's name ends in .gz; bytes never are.
    """
    check_output_file(path)
    raw = content if isinstance(content, bytes) else _encode_text(content)
    if path.suffix == ".gz" and isinstance(content, str):
        raw = gzip.compress(raw, mtime=0)  # Equal texts give equal files, whenever they are written.
    if not path.exists() or path.is_file():  # Otherwise it is a pipe or a device.
        _write_files(path.parent, {path.name: raw})
        return
    try:
        path.write_bytes(raw)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """`write_file` for a text too long to be held in memory."""
    check_output_file(path)
    if path.exists() and not path.is_file():  # A pipe or a device.
        write_file(path, "".join(parts))
        return
    try:
        with _temporary_folder(path.parent) as temporary:
            new_file = temporary / path.name
            with gzip.open(new_file, "wb") if path.suffix == ".gz" else new_file.open("wb") as stream:
                for part in parts:
                    stream.write(_encode_text(part))
            new_file.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def check_output_file(path: Path) -> None:
    """Refuse a file that `write_file` could not write, before the work rather than after."""
    is_directory = _is_directory(path)
    exists = is_directory is not None
    if exists and not is_directory and not path.is_file():  # A pipe or a device.
        if not os.access(path, os.W_OK):
            raise InputError(f"{path}: no permission to write to it; name another file with -o")
        return  # It is written to directly, so its folder need not be writable.
    if path.parent.absolute() in _OUTPUT_FOLDERS:
        _refuse_link(path.parent)
    _check_writable(path.parent)
    if is_directory:
        raise InputError(f"{path}: is a directory; name a file with -o")


def check_output_directory(directory: Path) -> None:
    """Refuse a place that `write_files` could not write to, before hours of work rather than after.

    If the folder becomes a link later, `write_file` refuses it too.
    """
    _check_writable(directory)
    _refuse_link(directory)
    _OUTPUT_FOLDERS.add(directory.absolute())


def _refuse_link(directory: Path) -> None:
    """Refuse a link: whoever could replace the folder by a link would choose where the files go."""
    if directory.is_symlink():
        raise InputError(
            f"{directory}: is a link to {directory.resolve()}, and nothing is written through links; name "
            "the folder itself with -o"
        )


def _check_writable(directory: Path) -> None:
    """Refuse a folder that cannot be written to, or made."""
    existing = directory
    while (is_directory := _is_directory(existing)) is None:
        if os.path.lexists(existing):
            raise InputError(f"{directory}: {existing} is a link to nothing; name another one with -o")
        existing = existing.parent
    if not is_directory:
        place = "exists and" if existing == directory else str(existing)
        raise InputError(f"{directory}: {place} is not a directory; name another one with -o")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{directory}: no permission to write in {existing}; name another one with -o")
    trial = existing / f"{TEMPORARY_PREFIX}{os.getpid()}"
    try:  # For root, and on some file systems, the answer of `access` may be wrong.
        with suppress(FileExistsError):
            trial.mkdir()
        trial.rmdir()
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"{directory}: nothing can be written in {existing} ({why}); name another one with -o"
        ) from None


def _is_directory(path: Path) -> bool | None:
    """Whether the path is a directory; None if it does not exist. Raises InputError for a name that no file
    can have.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error}); name another one") from None


def is_path(name: str) -> bool:
    """Whether a file or folder of this name exists; False for a name that no file can have."""
    try:
        return bool(name) and Path(name).exists()
    except OSError:
        return False

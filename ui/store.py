"""What the app keeps between reloads: one SQLite file and the uploaded traces, in a folder of the user's.

sessions   the inputs of one session's page Plan, and the plan it looks at
pages      documents of its other pages: their inputs, and where their latest answers are
plans      every plan that was made, with its inputs; `result` is its key in results
results    what a job computed, by the hash of all that it was computed from
traces     the traces that a session has uploaded. The files are at traces/HASH/NAME, by the hash of their
           content; so are, without a row here, config.json files of LLMs and what the page Watch reads

The column `asked` holds a form (question.py): the inputs of the page Plan.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sqlite3
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from planner.errors import InputError
from planner.files.checked_files import check_output_directory, open_text, repository_dir, write_file
from planner.traffic.logs import log_tables

Document = dict[str, Any]
T = TypeVar("T")  # What the function returns that `read_as` calls.

FILE = "fleetplan.sqlite"
SAMPLES = "samples"
MOST_NAME_BYTES = 200  # Of an upload's name; file systems take 255.
_BUSY_S = 20.0  # How long a write waits for the write of another process.
_SCHEMA = """
pragma journal_mode = wal;
create table if not exists sessions (id text primary key, asked text, plan text);
create table if not exists plans (id text primary key, session text not null, name text not null,
    made text not null, asked text not null, result text not null);
create table if not exists results (key text primary key, document text not null, files blob not null);
create table if not exists pages (session text not null, page text not null, inputs text not null,
    primary key (session, page));
create table if not exists traces (session text not null, reference text not null,
    primary key (session, reference));
"""


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """One row of plans; `form` has the inputs of the question, `result` the key of its result."""

    id: str
    session: str
    name: str
    made: str  # UTC, to the second.
    form: Document
    result: str


class Store:
    """The folder and its database. Every method opens the database anew, so threads and processes may share
    it.
    """

    def __init__(self, folder: Path) -> None:
        check_output_directory(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        try:
            with self._open() as db:
                db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise InputError(f"{folder / FILE}: cannot be used as a database ({error})") from None

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection to the database, which commits and closes at the end of the block."""
        with closing(sqlite3.connect(self.folder / FILE, timeout=_BUSY_S)) as db, db:
            yield db

    def _first_row(self, query: str, *values: str) -> tuple[Any, ...] | None:
        """The first row that a query finds; None if there is none."""
        with self._open() as db:
            row: tuple[Any, ...] | None = db.execute(query, values).fetchone()
        return row

    def _write(self, statement: str, *values: str | bytes) -> None:
        """Run one statement that changes the database."""
        with self._open() as db:
            db.execute(statement, values)

    def stored_form(self, session: str) -> Document | None:
        """The inputs as this session left them."""
        row = self._first_row("select asked from sessions where id = ?", session)
        return json.loads(row[0]) if row and row[0] else None

    def keep_form(self, session: str, form: Document) -> None:
        """Keep the inputs of the page Plan."""
        self._write(
            "insert into sessions (id, asked) values (?, ?) on conflict (id) do update set asked = "
            "excluded.asked",
            session,
            json.dumps(form),
        )

    def copy_session(self, old: str, new: str) -> None:
        """Begin a session with the question, the plan, the pages and the traces of another."""
        with self._open() as db:
            db.execute(
                "insert or ignore into sessions select ?2, asked, plan from sessions where id = ?1",
                (old, new),
            )
            db.execute(
                "insert or ignore into pages select ?2, page, inputs from pages where session = ?1",
                (old, new),
            )
        self.share_traces(old, new)

    def share_traces(self, old: str, new: str) -> None:
        """Let a session choose from the uploads of another."""
        self._write(
            "insert or ignore into traces select ?2, reference from traces where session = ?1 order by rowid",
            old,
            new,
        )

    def page_document(self, session: str, page: str) -> Document | None:
        """What another page than Plan last kept under the name `page`; None if it kept nothing."""
        row = self._first_row("select inputs from pages where session = ? and page = ?", session, page)
        return json.loads(row[0]) if row else None

    def keep_page_document(self, session: str, page: str, document: Document) -> None:
        """Keep the inputs of a page other than Plan, or where its latest answer is."""
        self._write("insert or replace into pages values (?, ?, ?)", session, page, json.dumps(document))

    def current_plan(self, session: str) -> SavedPlan | None:
        """The saved plan that this session shows; None if it shows none, or the plan is gone."""
        row = self._first_row("select plan from sessions where id = ?", session)
        return self.plan(row[0]) if row and row[0] else None

    def look_at(self, session: str, plan: str) -> None:
        """Make a plan the one this session looks at."""
        self._write(
            "insert into sessions (id, plan) values (?, ?) on conflict (id) do update set plan = "
            "excluded.plan",
            session,
            plan,
        )

    def add_plan(self, session: str, name: str, form: Document, result: str) -> str:
        """Keep a plan and make it the one the session looks at; returns its id. `result` is the key of what a
        job computed.
        """
        plan, made = uuid.uuid4().hex, datetime.now(UTC).isoformat(" ", "seconds")[:19]
        row = plan, session, name, made, json.dumps(form), result
        self._write("insert into plans values (?, ?, ?, ?, ?, ?)", *row)
        self.look_at(session, plan)
        return plan

    def plans(self, session: str | None = None) -> list[SavedPlan]:
        """The plans of a session, or of all; the latest first."""
        with self._open() as db:
            rows = db.execute(
                "select * from plans where ? is null or session = ? order by made desc, rowid desc",
                (session, session),
            )
            return [_saved_plan(row) for row in rows]

    def plan(self, plan: str) -> SavedPlan | None:
        """The plan of this id; None if it was deleted."""
        row = self._first_row("select * from plans where id = ?", plan)
        return _saved_plan(row) if row else None

    def rename_plan(self, plan: str, name: str) -> None:
        """Give a saved plan another name."""
        self._write("update plans set name = ? where id = ?", name, plan)

    def delete_plan(self, plan: str) -> None:
        """Forget a plan, and its result unless another plan has the same."""
        with self._open() as db:
            db.execute("update sessions set plan = null where plan = ?", (plan,))
            db.execute(
                "delete from results where key = (select result from plans where id = ?1) and not exists "
                "(select 1 from plans where id <> ?1 and result = results.key)",
                (plan,),
            )
            db.execute("delete from plans where id = ?", (plan,))

    def document(self, key: str) -> Document | None:
        """The result of a job as a mapping; None if there is none."""
        row = self._first_row("select document from results where key = ?", key)
        return json.loads(row[0]) if row else None

    def packed(self, key: str) -> bytes:
        """The files of a result as a zip; an empty zip if there is no result."""
        row = self._first_row("select files from results where key = ?", key)
        return bytes(row[0]) if row else zip_files({})

    def files(self, key: str, prefix: str = "") -> dict[str, bytes]:
        """The files of a result whose names begin with `prefix`."""
        with zipfile.ZipFile(io.BytesIO(self.packed(key))) as archive:
            return {name: archive.read(name) for name in archive.namelist() if name.startswith(prefix)}

    def keep_result(self, key: str, document: Document, packed: bytes) -> None:
        """Keep what a job computed; `packed` is a zip of its files, as `zip_files` makes it."""
        self._write("insert or replace into results values (?, ?, ?)", key, json.dumps(document), packed)

    def add_trace(self, session: str, name: str, content: bytes) -> str:
        """Keep an uploaded trace under its own name, which the commands of plans state; returns its
        reference, HASH/NAME.
        """
        path = self.add_file(name, content)
        reference = f"{path.parent.name}/{path.name}"
        self._write("insert or ignore into traces values (?, ?)", session, reference)
        return reference

    def add_file(self, name: str, content: bytes) -> Path:
        """Keep an upload by the hash of its content; returns where."""
        plain_name = re.sub(r"[^\w.()+ -]", "_", Path(name).name).lstrip(".")
        # Where the cut is within a letter, the bytes that are left of the letter are ignored.
        name = plain_name.encode()[-MOST_NAME_BYTES:].decode(errors="ignore") or "upload"
        path = self.folder / "traces" / hashlib.sha256(content).hexdigest() / name
        if not path.exists():
            write_file(path, content)
        return path

    def traces(self, session: str) -> list[str]:
        """References of the samples and of what this session uploaded."""
        samples = sorted((repository_dir("examples") / "traces").glob("*-sample.*"))
        with self._open() as db:
            rows = db.execute("select reference from traces where session = ? order by rowid", (session,))
            uploads = [reference for (reference,) in rows]
        return [*(f"{SAMPLES}/{path.name}" for path in samples), *uploads]

    def trace_path(self, reference: str) -> Path:
        """The path of a trace; raises InputError for a text that cannot be the reference of an upload or
        sample.
        """
        folder, _, name = reference.partition("/")
        is_known_folder = re.fullmatch(rf"{SAMPLES}|[0-9a-f]{{64}}", folder)  # The samples, or a hash.
        if not is_known_folder or not name or Path(name).name != name:
            raise InputError(f"trace {reference!r}: is none of this folder; upload it again")
        if folder == SAMPLES:
            return repository_dir("examples") / "traces" / name
        return self.folder / "traces" / folder / name


def _saved_plan(row: tuple[Any, ...]) -> SavedPlan:
    """A row of the table of plans as a SavedPlan."""
    plan, session, name, made, form, result = row
    return SavedPlan(plan, session, name, made, json.loads(form), result)


def read_as(name: str, content: bytes, read: Callable[[Path], T]) -> T:
    """Give `content` to a function that reads files; returns its result. Errors name the file as `name`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(content)
        try:
            return read(path)
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "")) from None


def column_names(path: Path) -> list[str]:
    """The columns of a log: of a Parquet file those with one value per row, of a CSV its header, of JSON
    lines the keys of the first; none of another text. Raises InputError for what cannot be read.
    """
    if path.suffix in (".parquet", ".pq"):
        return log_tables.parquet_names(log_tables.parquet_file(path))
    with open_text(path) as stream:
        first = next((line.strip() for line in stream if line.strip()), b"").decode(errors="replace")
    if first[:1] in ("{", "["):
        try:
            row = json.loads(first)
        except ValueError:
            return []
        return [str(name) for name in row] if isinstance(row, dict) else []
    return next(csv.reader([first]), [])


def error_line(error: Exception) -> str:
    """The error in one line, as the command prints it. Only the file's name stays of a path such as
    "/a/store/slo.yaml, line 3: ": users do not know the folders of the store.
    """
    return re.sub(r"(?<![:/\w.])/\S*/(?=[^/\s]+(, line |: ))", "", " ".join(str(error).split()))


def zip_files(files: Mapping[str, str | bytes]) -> bytes:
    """A zip of files, the same bytes for the same files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return stream.getvalue()

"""What the documents say exists: links, names in the code, commands, examples."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import manifest_commands
import pytest
from typer.main import get_command

from planner import manifests
from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.documents.task import read_task
from planner.manifests import engine_command, kubernetes
from planner.solvers import master
from planner.traffic.formats import FORMATS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES: dict[str, list[str]] = {}  # the last part of a module's name: the modules that end in it
for path in (ROOT / "planner").rglob("*.py"):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    MODULES.setdefault(module.rsplit(".", 1)[-1], []).append(module)
MOST_WORDS = {"README.md": 1300, "docs": 25_000}
FILE_ENDINGS = ("yaml", "json", "csv", "html", "md", "py", "env", "toml", "png")


def names_in(text: str) -> list[str]:
    """The dotted names in backticks whose first part is a module of ours: `master.bound_objective`."""
    dotted = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)`", text)
    return [
        name
        for name in dotted
        if name.split(".")[0] in (*MODULES, "planner") and name.rsplit(".", 1)[1] not in FILE_ENDINGS
    ]


def missing(name: str) -> str | None:
    """The part of a dotted name that does not exist, None if all does. First stands a module or its room."""
    first, *rest = name.removeprefix("planner.").split(".")
    lacking = first
    for module in MODULES.get(first, []):
        found, parts = importlib.import_module(module), list(rest)
        while parts and f"{found.__name__}.{parts[0]}" in MODULES.get(parts[0], []):  # a module of this room
            found = importlib.import_module(f"{found.__name__}.{parts.pop(0)}")
        if (lacks := _lacks(found, parts)) is None:
            return None
        lacking = lacks
    return lacking


def _lacks(found: object, parts: list[str]) -> str | None:
    for part in parts:
        if hasattr(found, part):
            found = getattr(found, part)
        elif part in getattr(found, "__annotations__", {}):  # a field
            return None
        else:
            return part
    return None


def test_the_documents_stay_short() -> None:
    """What people read; docs/evidence holds what was measured, docs/tables what is looked up."""
    readme = len((ROOT / "README.md").read_text().split())
    docs = sum(len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md"))
    assert readme <= MOST_WORDS["README.md"] and docs <= MOST_WORDS["docs"]


def test_every_page_is_linked_from_the_index_and_the_menu() -> None:
    index, menu = (ROOT / "docs" / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS if path.parent != ROOT]
    assert [page for page in pages if page != "index.md" and f"]({page})" not in index] == []
    assert [page for page in pages if f": {page}" not in menu] == []


def test_the_secret_is_created_as_the_manifests_read_it() -> None:
    """Under another key than HF_TOKEN every pod waits for it."""
    lines = [
        line.strip()
        for path in DOCUMENTS
        for line in path.read_text().splitlines()
        if line.strip().startswith("kubectl create secret generic hf-")
    ]
    assert len(lines) >= 2 and set(lines) == {kubernetes.SECRET}


def test_missing_finds_what_is_wrong() -> None:
    assert missing("master.bound_objective") is None
    assert missing("planner.domain.Gpu.power_w") is None
    assert missing("master.no_such_function") == "no_such_function"
    assert missing("latency.StepLatency.z_s") == "z_s"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", document.read_text())
    relative = [link.split("#")[0] for link in links if "://" not in link]
    assert [link for link in relative if link and not (document.parent / link).exists()] == []
    parted = [link.partition("#") for link in links if "://" not in link and "#" in link]
    pages = {page: (document.parent / page if page else document).read_text() for page, _, _ in parted}
    assert [f"{page}#{part}" for page, _, part in parted if part not in parts_of(pages[page])] == []


def parts_of(text: str) -> set[str]:
    """The anchors of a page's headings: small letters, digits, hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_backticks_exist(document: Path) -> None:
    assert [name for name in names_in(document.read_text()) if missing(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_backticks_exist(document: Path) -> None:
    """Those that begin with a folder of ours: `planner/domain.py`, `catalogs/latency`."""
    folders = "planner|profiling|runtime|ui|catalogs|examples|benchmarks|docs|tests"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)", document.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_mechanism_of_the_papers_has_its_tests_or_a_reason() -> None:
    """Of each cell of the table: a test that exists, a script that exists (see above), or words."""
    text = (ROOT / "docs" / "tables" / "mechanisms.md").read_text()
    rows = re.findall(r"^\| (?!mechanism )(.+) \|$", text, flags=re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert f"The {len(rows)} mechanisms" in text and {len(row) for row in cells} == {5}
    named = {test for row in cells for test in re.findall(r"`(tests/[\w/]+\.py::\w+)`", " ".join(row[1:4]))}
    defined = {test: (ROOT / test.split("::")[0]).read_text() for test in named}
    lost = [test for test, source in defined.items() if f"def {test.split('::')[1]}(" not in source]
    assert lost == []
    for name, simulated, planned, deployed, figure in cells:
        assert all(re.search(r"[a-z]{3}", cell) for cell in (simulated, planned, deployed, figure)), name


def test_constraints_have_their_names_in_the_code() -> None:
    """The first column of the master problem's table, without its index, in docstring and source."""
    text = (ROOT / "docs" / "formulations.md").read_text()
    table = text.split("| name | constraint |")[1].split("\n\n")[0]
    names = re.findall(r"^\| (\w+) \|", table, flags=re.MULTILINE)
    assert len(names) == 13
    source = Path(str(master.__file__)).read_text()
    for name in names:
        assert name in str(master.__doc__)
        stem = name.rsplit("_", 1)[0] + "_{" if name[-2] == "_" else f'"{name}"'
        assert stem in source, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_parse(document: Path, tmp_path: Path) -> None:
    """YAML blocks that begin with the name of the file they show."""
    catalog = read_catalog()
    blocks = re.findall(r"```yaml\n# (slo|fleet)\.yaml\n(.*?)```", document.read_text(), flags=re.DOTALL)
    if document.name in ("README.md", "file-formats.md"):
        assert blocks
    for kind, text in blocks:
        path = tmp_path / f"{kind}.yaml"
        path.write_text(text)
        if kind == "slo":
            assert read_task(path, catalog).slo.limits
        else:
            assert read_fleet(path, catalog).workers > 0


def test_every_trace_format_has_its_row() -> None:
    text = (ROOT / "docs" / "file-formats.md").read_text()
    for known in FORMATS:
        (row,) = [line for line in text.splitlines() if re.match(rf"\| {known.name}\b", line)]
        assert all(f"`{column.partition('.')[0]}`" in row for column in known.columns), row


def commands_in(text: str) -> list[str]:
    """Every `plan ...` and `make ...` line of a document, and those in backticks."""
    lines = re.findall(r"^ {4,}((?:plan|make) .*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    return lines + re.findall(r"`((?:plan|make) [^`]*)`", text)


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_of_the_documents_exist(document: Path) -> None:
    """Their subcommand or target, and their options."""
    root = get_command(app)
    commands = getattr(root, "commands", {})
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    lines = commands_in(document.read_text())
    assert document.stem != "README" or len(lines) > 6
    for line in lines:
        program, *words = re.split(r" {2,}|#", line)[0].split()
        if program == "make":
            assert words[0] in targets, line
            continue
        if not re.match("[a-z-]", words[0]):  # "$QUESTION", or "..."
            continue
        command = root if words[0].startswith("-") else commands[words[0]]
        if command is not root and (own := getattr(command, "commands", None)):
            command = own.get(words[1], own["show"])
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        assert [word for word in words if word.startswith("-") and word not in options] == [], line


def test_scripts_of_the_documents_exist() -> None:
    """`python benchmarks/plans.py` and the like."""
    for document in DOCUMENTS:
        for script in re.findall(r"python ((?:benchmarks|examples)/[\w.]+)", document.read_text()):
            assert (ROOT / script).exists(), f"{document.name}: {script}"


def test_what_the_documents_do_with_manifests_fits_them() -> None:
    """The secret they create has the name and the keys that pods read; the files they apply are written.

    `--from-literal=token=` made a secret without the key: pods started, without a token, as it is optional.
    """
    fleets = manifest_commands.EXAMPLES.values()
    rendered = [manifests.render(fleet, 8192, "all") for fleet in fleets]
    files = {name: text for one in rendered for name, text in one.files.items()}
    read = {match for text in files.values() for match in _keys_read(text)}
    assert read == {(engine_command.SECRET_NAME, engine_command.SECRET_KEY)}
    said = "\n".join(document.read_text() for document in DOCUMENTS)
    said += "\n".join(text for name, text in files.items() if name.endswith("README.md"))
    secrets = set(re.findall(r"kubectl create secret generic (\S+) --from-literal=([^=\s]+)=", said))
    assert secrets == read
    for applied in re.findall(r"(?:kubectl apply|docker compose(?: --env-file \S+)?) -f (\S+)", said):
        assert any(name.endswith(applied.removeprefix("deploy/")) for name in files), applied


def _keys_read(text: str) -> list[tuple[str, str]]:
    """(secret, key) of every `secretKeyRef`, whichever comes first."""
    found = []
    for block in re.findall(r"secretKeyRef:\n((?: +\w+: .*\n){2,3})", text):
        fields = dict(line.strip().split(": ") for line in block.splitlines())
        found.append((fields["name"], fields["key"]))
    return found

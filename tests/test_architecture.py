"""The rooms of docs/architecture.md: imports go down, modules stand in rooms, functions stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "architecture.md").read_text().split("| room | holds |")[1].split("\n\n")[0]
ROOMS = re.findall(r"^\| `([\w.]+)` \|", TABLE, flags=re.MULTILINE)  # the highest first
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("planner", "fleetplan", "profiling", "ui")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
LONGEST_LINES = 80
LONGEST_CHAIN = 35  # Of modules that import each other, so that one of them can be read without many others.
MOST_PARAMETERS = 8
COMPILED = "jit"  # in the decorators of functions that Numba compiles
AT_THE_COMMAND_LINE = ("planner.cli", "planner.commands")  # a parameter there is an option


def room_of(module: str) -> str | None:
    """None for the root package `planner`, which imports nothing."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "planner" else 1]) if module != "planner" else None


@cache
def nodes(module: str) -> list[ast.AST]:
    """All of its syntax tree, which is read and walked once for all tests."""
    return list(ast.walk(ast.parse(SOURCES[module].read_text())))


def imported(module: str) -> Iterator[tuple[str, int]]:
    """The modules of ours that it imports, inside functions too, with the line."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module} imports relatively"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in SOURCES else node.module for name in inside]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name in SOURCES)


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(COMPILED in ast.unparse(one) for one in function.decorator_list)


def name_of(called: ast.expr) -> str | None:
    """The last part of what is called."""
    return getattr(called, "attr", getattr(called, "id", None))


def test_every_module_stands_in_a_room() -> None:
    assert {room_of(module) for module in SOURCES} - {None} == set(ROOMS)


def test_at_most_seven_modules_are_loose() -> None:
    loose = [path.name for path in (ROOT / "planner").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= 7, loose


@pytest.mark.parametrize(
    ("room", "files"), [("simulator", "*.py"), ("search", "*/*.py"), ("solvers", "*.py")]
)
def test_a_map_names_each_module_of_its_room_once(room: str, files: str) -> None:
    folder = ROOT / "planner" / room
    rows = re.findall(r"^    [\w, ]+?  +(\w.*)$", (folder / "__init__.py").read_text(), flags=re.MULTILINE)
    modules = [path.stem for path in folder.glob(files) if path.name != "__init__.py"]
    assert sorted(", ".join(rows).split(", ")) == sorted(modules)


def test_a_name_stands_for_one_thing() -> None:
    """No two modules of planner/ share a name, and no two public classes of the installed code do."""
    named: dict[str, list[str]] = defaultdict(list)
    for module, path in SOURCES.items():
        if module.startswith("planner.") and path.name != "__init__.py":
            named[path.name].append(module)
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].append(module)
    assert {name: modules for name, modules in named.items() if len(modules) > 1} == {}


def test_imports_go_down() -> None:
    """Those inside functions too."""
    up = []
    for module in SOURCES:
        own = room_of(module)
        below = {None, own, *ROOMS[ROOMS.index(own) :]} if own else {None}
        up += [(module, name, line) for name, line in imported(module) if room_of(name) not in below]
    assert up == []


def test_the_folders_of_the_search_import_downwards_alone() -> None:
    """In the order of docs/architecture.md, the highest first."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `planner.search` |"))
    order = re.findall(r"`(\w+)`", row.split("|")[2])
    assert set(order) == {path.parent.name for path in (ROOT / "planner" / "search").glob("*/__init__.py")}
    upwards = [
        f"{module} imports {name}, line {line}"
        for module in SOURCES
        if module.startswith("planner.search.")
        for name, line in imported(module)
        if name.startswith("planner.search.")
        and order.index(name.split(".")[2]) < order.index(module.split(".")[2])
    ]
    assert not upwards, upwards


def test_the_day_is_a_wing_that_commands_and_pages_alone_import() -> None:
    """The spine does without it: only the registry of commands and what a user starts name it."""
    doors = ("ui", "fleetplan", "planner.cli", "planner.commands", "planner.day")
    inside = [
        f"{module} imports {name}, line {line}"
        for module in SOURCES
        if room_of(module) not in doors
        for name, line in imported(module)
        if room_of(name) == "planner.day"
    ]
    assert not inside, inside


def test_no_two_modules_of_a_room_import_each_other() -> None:
    """Nor around a longer way: what may be loaded alone may be read alone."""
    imports = {module: {name for name, _ in imported(module)} for module in SOURCES}
    done: set[str] = set()
    knots: list[list[str]] = []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            knots.append(way[way.index(module) :])
        elif module not in done:
            for name in sorted(imports[module]):
                visit(name, [*way, module])
            done.add(module)

    for module in SOURCES:
        visit(module, [])
    assert knots == []


def test_chains_of_imports_are_short() -> None:
    """Of imports at the top of modules, with both ends counted."""
    loads = {
        module: {
            name if (name := f"{node.module}.{alias.name}") in SOURCES else node.module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        & SOURCES.keys()
        for module, path in SOURCES.items()
    }

    @cache
    def longest(module: str) -> list[str]:
        return [module, *max((longest(name) for name in loads[module]), key=len, default=[])]

    chain = max((longest(module) for module in loads), key=len)
    assert len(chain) <= LONGEST_CHAIN, chain


def test_functions_are_short() -> None:
    long = {
        (module, function.name): lines
        for module in SOURCES
        for function in functions(module)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONGEST_LINES
        and not is_compiled(function)
    }
    assert long == {}


def test_public_functions_have_few_parameters() -> None:
    def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        given = function.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return len([name for name in names if name not in ("self", "cls")])

    many = {
        (module, function.name): count(function)
        for module in SOURCES
        if not module.startswith(AT_THE_COMMAND_LINE)
        for function in functions(module)
        if not function.name.startswith("_") and not is_compiled(function)
        if count(function) > MOST_PARAMETERS
    }
    assert many == {}


def test_the_files_that_a_comment_names_exist() -> None:
    """`search/level0/pruning_rules.py` and `planner/search/level0/pruning_rules.py`; those of other projects
    begin elsewhere.
    """
    rooms = [path.name for path in (ROOT / "planner").iterdir() if path.is_dir()]
    path = re.compile(rf"(?<![\w/.])(?:planner/|benchmarks/|(?={'|'.join(rooms)}))[\w/]+\.py\b")
    gone = [
        (module, name)
        for module, source in SOURCES.items()
        for name in path.findall(source.read_text())
        if not (ROOT / name).exists() and not (ROOT / "planner" / name).exists()
    ]
    assert gone == []


def test_sentences_use_the_glossary() -> None:
    """An SLO is no promise, and scenarios are no futures: the words that the glossary took the place of."""
    wrong = [
        f"{module}:{node.lineno}: {node.value.strip()[:80]}"
        for module in SOURCES
        for node in nodes(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if re.search(r"\bpromised?\b|\bfutures\b", node.value) and "`" not in node.value
    ]
    assert not wrong, wrong


def test_no_test_module_imports_another() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert re.findall(r"^\s*(?:from|import) (?:\w+\.)*test_\w+", path.read_text(), re.MULTILINE) == [], (
            path
        )


def test_the_planner_does_without_torch_vllm_and_streamlit() -> None:
    """Those who ask a server for a plan need none of them."""
    heavy = ("torch", "vllm", "streamlit")
    for module in SOURCES:
        if room_of(module) in ("planner.runtime", "profiling", "ui"):
            continue
        for node in nodes(module):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in heavy], module


def test_documents_are_read_without_numba() -> None:
    """Who reads a question or a fact of a plan does not wait for the compiler: two seconds of every start."""
    program = (
        "import sys, planner.documents.slo, planner.documents.facts, planner.documents.certificate\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_what_is_installed_imports_nothing_of_the_checkout_alone() -> None:
    """The wheel has no benchmarks and no tests."""
    for module in SOURCES:
        named = [node.module or "" for node in nodes(module) if isinstance(node, ast.ImportFrom)]
        named += [a.name for node in nodes(module) if isinstance(node, ast.Import) for a in node.names]
        assert not {name.split(".")[0] for name in named} & {"benchmarks", "tests"}, module


def test_every_worker_type_is_told_its_llm() -> None:
    """Windows and states of an LLM that nobody names cost no KV cache. What takes no time needs none."""
    untold = []
    for module in SOURCES:
        told = {
            id(node.value)
            for node in nodes(module)
            if isinstance(node, ast.Attribute) and node.attr == "with_llm"
        }
        untold += [
            f"{module}:{node.lineno}"
            for node in nodes(module)
            if isinstance(node, ast.Call) and name_of(node.func) == "WorkerType"
            if id(node) not in told
            and "INSTANT"
            not in {ast.unparse(one) for one in (*node.args, *(word.value for word in node.keywords))}
        ]
    assert untold == [], "WorkerType(...).serving(llm)"


def test_no_formatter_is_told_to_skip() -> None:
    skip = "fmt: " + "skip"
    assert [path.name for path in SOURCES.values() if skip in path.read_text()] == []

"""The digest by which stored machine code is found again."""

from __future__ import annotations

import ast
from pathlib import Path

from planner.simulator import numba_compile


def test_it_counts_every_file_below_from_which_compiled_functions_take_constants() -> None:
    """Constants of layout.py are in compiled functions too, so all that it imports is."""
    files = set()
    for path in Path(numba_compile.__file__).parent.glob("*.py"):
        body = ast.parse(path.read_text()).body
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        compiled = [node for node in functions if any(mark in node_marks(node) for mark in ("jit", "where_"))]
        used = {
            name.id
            for node in (body if path.name == "layout.py" else compiled)
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
        }
        for node in imports:
            room = str(node.module).removeprefix("planner.")
            if node.module != room and not room.startswith("simulator"):
                files |= {room.replace(".", "/") + ".py" for alias in node.names if alias.name in used}
    assert files == set(numba_compile._BELOW)


def node_marks(function: ast.FunctionDef) -> str:
    return " ".join(ast.unparse(decorator) for decorator in function.decorator_list)

"""No call has more than five arguments by position, splats counted: two that change places are seen
by nobody. What stands in a tuple that is splatted, or in one of that name, counts by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "gpuir"
MOST = 5


def tuples(function: ast.AST) -> dict[str, int]:
    """How many elements each name of a function has that is a tuple written out."""
    found: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = max(found.get(target.id, 0), width(node.value.elts, found))
    return found


def width(args: list[ast.expr], known: dict[str, int]) -> int:
    """How many arguments there are at least."""
    return sum(each(arg, known) for arg in args)


def each(arg: ast.expr, known: dict[str, int]) -> int:
    match arg:
        case ast.Starred(ast.Tuple(elts) | ast.List(elts)):
            return width(elts, known)
        case ast.Starred(ast.Name(name)):
            return known.get(name, 1)
        case _:
            return 1


def may_be_long(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return len(node.args) > MOST or any(isinstance(arg, ast.Starred) for arg in node.args)


def long_calls(path: Path) -> Iterator[tuple[int, ast.Call]]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    if not any(map(may_be_long, nodes)):
        return
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[ast.Call] = set()
    for scope in (*reversed(functions), tree):  # the innermost function first
        calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and may_be_long(n)]
        known = tuples(scope) if calls else {}
        for node in calls:
            if node not in seen:
                seen.add(node)
                if (n := width(node.args, known)) > MOST:
                    yield n, node


def test_calls_have_five_arguments_by_position_at_most():
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {n} by position: {ast.unparse(call)[:200]}"
        for path in sorted(ROOT.rglob("*.py"))
        for n, call in long_calls(path)
    ]
    assert found == []

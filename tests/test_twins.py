"""The twins: what stands in both scripts is the same in both. Delete a line from the list to let yours differ."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TWINS = """
Run start_run load_sharded build_optimizer lr_factor compute_features packed_rows apply_gradients
""".split()


def definitions(source: str) -> dict[str, str]:
    """Name -> syntax tree of every function, class and method of a script; comments and line breaks do not count."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.dump(node)
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = ast.dump(method)
    return found


def differing(first: str, second: str, names: list[str]) -> list[str]:
    """The names that are not the same in both sources, or not there."""
    a, b = definitions(first), definitions(second)
    return [name for name in names if name not in a or a[name] != b.get(name)]


@pytest.fixture(scope="module")
def scripts() -> tuple[str, str]:
    return tuple((ROOT / name).read_text(encoding="utf-8") for name in ("train_ppo_vl.py", "train_grm_vl.py"))


def test_twins_are_the_same(scripts):
    assert differing(*scripts, TWINS) == [], "a change of one twin is a change of the other"


def test_what_is_the_same_is_listed(scripts):
    """A function that happens to be the same in both is a twin: a fix of one only would go unnoticed."""
    a, b = map(definitions, scripts)
    assert sorted(name for name in a.keys() & b.keys() if a[name] == b[name] and name not in TWINS
                  and name.split(".")[0] not in TWINS) == []


def test_a_difference_is_noticed(scripts):
    first, second = scripts
    assert differing(first, second.replace("math.isfinite(norm)", "True"), TWINS) == ["apply_gradients"]
    assert differing(first.replace("def lr_factor(", "def factor("), second, TWINS) == ["lr_factor"]
    assert differing(first, second.replace("    applied = math", "    # why\n    applied  = math"), TWINS) == []

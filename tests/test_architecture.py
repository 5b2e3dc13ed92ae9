"""What a fork can rely on: which file may import which, without a circle, and a `main` that names the stages.

Sizes, names and lengths of lines are rules for the authors alone: .ci/rules.py."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo_vl.py", "train_grm_vl.py")
FILES = [ROOT / name for name in (*SCRIPTS, "launch/plan.py")] + sorted(
    (ROOT / "common").rglob("*.py")
)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert)

# What is in common/, from the ground up, and what of that before it each may import. A module or
# package that is not listed may be imported by all, and may import all, as long as there is no
# circle.
TABLE = """\
losses
ground
logprobs     ground
distributed  ground
answers      ground
child        ground answers
user_code    ground answers child
flags        ground
sampling
buffers      ground distributed sampling
logging      ground distributed flags
data         ground distributed flags buffers
model        ground losses logprobs distributed flags sampling buffers logging data
memory       ground logprobs distributed flags sampling buffers logging data model
looks        ground losses logprobs distributed flags buffers logging data model
rewards      ground losses distributed child user_code flags buffers data model
reports      ground distributed buffers data rewards
envs         ground distributed child user_code flags sampling buffers data model
rollout      ground logprobs distributed sampling buffers logging data model memory envs
identity     ground distributed user_code flags logging data model
run_folder   ground distributed flags
checkpoint   ground distributed flags logging data model identity run_folder
"""
PACKAGES = {package: set(imports) for package, *imports in map(str.split, TABLE.splitlines())}


def trees() -> dict[str, ast.Module]:
    """Of every file that is not empty, by its module's name: common/data/rows.py is common.data.rows."""
    trees = {}
    for path in FILES:
        name = (
            path.relative_to(ROOT)
            .as_posix()
            .removesuffix(".py")
            .replace("/", ".")
            .removesuffix(".__init__")
        )
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body:
            trees[name] = tree
    return trees


def imported(module: str, tree: ast.Module) -> set[str]:
    """What a file imports, by full names; of `from a import b` both a and a.b, which may be a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, node.module or ""]).strip(".")
            names |= {base, *(f"{base}.{name.name}" for name in node.names)}
    return names - {module}


def package_of(module: str) -> str:
    """The package, or module, of common/ that a module is in; "" of any other."""
    parts = module.split(".")
    return parts[1] if parts[0] == "common" and len(parts) > 1 else ""


def branches_of(function: ast.FunctionDef) -> int:
    nodes = list(ast.walk(function))
    ors = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + ors + sum(isinstance(node, BRANCHES) for node in nodes)


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return trees()


def test_a_package_imports_only_what_is_below_it(modules):
    for module, tree in modules.items():
        package = package_of(module)
        for name in imported(module, tree):
            other = package_of(name)
            assert {package, other} - PACKAGES.keys() or other in PACKAGES[package] | {package}, (
                f"{module} imports {name}, which is not below it. "
                "Let the caller pass what it needs, or move what both need "
                "into a package below both. If your fork wants it so, "
                f"write {other} into the line of {package} in TABLE of "
                "tests/test_architecture.py."
            )


def test_common_knows_no_script(modules):
    for module, tree in modules.items():
        for name in imported(module, tree):
            assert module == "launch.plan" or name.split(".")[0] not in (
                "launch",
                "tests",
                "train_ppo_vl",
                "train_grm_vl",
            ), (
                f"{module} imports {name}. common/ serves both scripts, "
                "and a script is copied to change it: move what is needed "
                "into common/, or let the script pass it."
            )


def test_imports_have_no_circle(modules):
    arrows = {module: imported(module, tree) & modules.keys() for module, tree in modules.items()}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        circle = " > ".join(reversed(error.args[1]))
        pytest.fail(
            f"a circle of imports: {circle}. Move what two of them need into a file of its own, "
            "which both import."
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_is_read_first_and_on_one_page(modules, script):
    functions = [
        node
        for node in modules[script.removesuffix(".py")].body
        if isinstance(node, ast.FunctionDef)
    ]
    main = functions[0]
    assert main.name == "main", (
        f"{script}: {main.name} stands before main, which names the stages: move it below"
    )
    lines, branches = main.end_lineno - main.lineno + 1, branches_of(main)
    assert lines <= 80 and branches <= 15, (
        f"{script}: main has {lines} lines and {branches} branches; "
        "to be read as the list of stages, it may have 80 and 15: make "
        "a function of what belongs to one stage, below main where the stage is."
    )

"""The house rules: which room may import which, and how much a reader has to carry.

Sizes are counted in expressions (`ast.expr` nodes), which do not change when lines are broken elsewhere.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo_vl.py", "train_grm_vl.py")
FILES = [ROOT / name for name in (*SCRIPTS, "launch/plan.py")] + sorted((ROOT / "common").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.Assert)

# Most expressions of the whole, of each script, of any other file.
SIZES = {"product": 54_800, "train_ppo_vl.py": 8_750, "train_grm_vl.py": 2_650, "file": 2_600}

# The rooms of common/, from the ground up, and which of those before it each may open.
TABLE = """\
losses
logprobs
distributed
files
flags        distributed files
buffers      distributed
logging      distributed files flags
data         distributed files flags buffers
model        losses logprobs distributed files flags buffers logging data
rewards      losses distributed files flags buffers data model
envs         distributed files flags buffers data model
"""
ROOMS = {room: set(opened) for room, *opened in map(str.split, TABLE.splitlines())}
FLOORS = 9  # of modules, the scripts on top
DOORS = ("common.data", "common.rewards")


def trees() -> dict[str, ast.Module]:
    """Of every file that is not empty, by its module's name: common/data/rows.py is common.data.rows."""
    trees = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".").removesuffix(".__init__")
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
            above = module.split(".")[:-node.level] if node.level else []
            base = ".".join([*above, node.module or ""]).strip(".")
            names |= {base, *(f"{base}.{name.name}" for name in node.names)}
    return names - {module}


def room_of(module: str) -> str:
    """The room of a module of common/; "" of any other."""
    parts = module.split(".")
    return parts[1] if parts[0] == "common" and len(parts) > 1 else ""


def floor_of(module: str, arrows: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    """1 for a module that imports none of ours, else one more than the highest it imports; the door of a room, which only
    names what is inside, is on the floor of its highest module."""
    assert module not in above, f"a circle: {' > '.join((*above, module))}"
    return (module not in DOORS) + max((floor_of(other, arrows, (*above, module)) for other in arrows[module]), default=0)


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return trees()


def test_rooms_open_only_what_is_below_them(modules):
    for module, tree in modules.items():
        rooms = {room_of(name) for name in imported(module, tree)} - {"", room_of(module)}
        if room_of(module):
            assert rooms <= ROOMS[room_of(module)], module
        roots = {name.split(".")[0] for name in imported(module, tree)}
        assert module == "launch.plan" or not roots & {"launch", "tests", "train_ppo_vl", "train_grm_vl"}, module
    before = set()
    for room, opened in ROOMS.items():
        assert opened <= before, room
        before.add(room)
    assert {room_of(module) for module in modules} - {""} == set(ROOMS)


def test_modules_have_few_floors_and_no_circle(modules):
    arrows = {module: imported(module, tree) & modules.keys() for module, tree in modules.items()}
    assert max(floor_of(module, arrows) for module in modules.keys() - {"launch.plan"}) <= FLOORS


def test_sizes(modules):
    sizes = {name: sum(isinstance(node, ast.expr) for node in ast.walk(tree)) for name, tree in modules.items()}
    assert sum(sizes.values()) <= SIZES["product"]
    for name, size in sizes.items():
        assert size <= SIZES.get(f"{name}.py", SIZES["file"]), name


def test_functions_fit_on_a_page(modules):
    """At most 50 lines (`main` 65), 15 branches and, but for formulas, 6 parameters."""
    for module, tree in modules.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            place = f"{module}.{function.name}"
            assert function.end_lineno - function.lineno < (65 if function.name == "main" else 50), place
            nodes = list(ast.walk(function))
            ors = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
            assert 1 + ors + sum(isinstance(node, BRANCHES) for node in nodes) <= 15, place
            names = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)} - {"self", "cls"}
            formula = module.rpartition(".")[2] in ("losses", "logprobs", "attention", "linear_attention")
            assert len(names) <= (9 if formula else 6), place


def test_lines_are_not_long():
    for path in FILES:
        assert max(map(len, path.read_text(encoding="utf-8").splitlines()), default=0) <= 110, path


def test_variables_are_called_by_what_they_hold():
    """Everywhere, in tests and tools too."""
    paths = [ROOT / script for script in SCRIPTS]
    for folder in ("common", "launch", "tests"):
        paths += (ROOT / folder).rglob("*.py")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            assert name not in ("found", "own", "said", "kept", "shown", "given"), f"{path}:{node.lineno}"


def test_the_top_level_is_fixed():
    allowed = {*SCRIPTS, "common", "launch", "tests", "requirements.txt", "README.md"}
    made = {"toy", "toy_describe", "runs", "real", "__pycache__"}  # by commands; not tracked
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "toy."))}  # toy.*: being made
    assert there <= allowed | made

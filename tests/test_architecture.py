"""The house rules, measured: sizes that a reader has to carry, and the direction of imports. A ratchet.

    python tests/test_architecture.py             what is above its goal, one line each
    python tests/test_architecture.py --tighten   lower CEILINGS in this file to what is measured
    python tests/test_architecture.py --start     write CEILINGS anew: what is measured now, lower or higher

A figure may not exceed its goal or, while it is still listed there, its ceiling in CEILINGS. Ceilings are
only lowered; a figure that has reached its goal leaves the table. `--tighten` does both. Sizes are counted
in expressions (`ast.expr` nodes), which do not change when lines are broken elsewhere. The second half of
the file violates every rule on purpose, in a few lines each.
"""

import ast
import io
import sys
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo_vl.py", "train_grm_vl.py")

# What holds for every file, function or script, or for the product as a whole.
GOALS = {
    "product: expressions": 36_000,
    "train_ppo_vl.py: expressions": 8_000,
    "train_grm_vl.py: expressions": 3_200,
    "file: expressions": 2_300,
    "file: expressions per code line": 6.5,
    "file: percent of code lines over 100 characters": 8,
    "file: characters of the longest line": 110,
    "file: named lambdas": 0,
    "file: loops over a conditional": 0,
    "file: texts times a truth value": 0,
    "main: lines": 80,
    "main: complexity": 13,
    "function: lines": 50,
    "function: complexity": 15,
    "function: parameters": 6,
    "formula: parameters": 9,  # of losses, logprobs, attention: their signatures follow papers and kernels
    "script: imported names": 45,
    "script: names imported from common": 25,
    "train_ppo_vl.py: flags": 115,
    "train_grm_vl.py: flags": 60,
    "script: functions that take run": 0,
    "product: nested functions": 12,
    "product: flags declared twice": 0,
    "common: functions that take a script's arguments": 0,
    "README.md: words": 2_800,
}
FORMULAS = ("losses.py", "logprobs.py", "attention.py")

# Figure: (ceiling, goal). A ceiling of `file`, `main` or `script` is for each of them. Functions have their
# own, by name and not by file, so that a function may move; one that is renamed is renamed here.
CEILINGS = {
    "product: expressions": (64_500, 36_000),
    "train_ppo_vl.py: expressions": (9_200, 8_000),
    "script: imported names": (52, 45),
    "script: names imported from common": (33, 25),
    "train_ppo_vl.py: flags": (124, 115),
    "train_grm_vl.py: flags": (62, 60),
}  # end of CEILINGS

# Modules from the ground up, and what each may import of its own floor. Lower floors are open to all above.
FLOORS = (
    {
        "common.files": (),
        "common.process": ("common.files",),
        "common.flags": ("common.process",),
        "common.settings": ("common.flags",),
        "common.cards": (),
        "common.losses": (),
        "common.fused": (),
        "common.logprobs": ("common.fused",),
        "common.distributed": ("common.process",),
        "common.conversations": ("common.distributed",),
        "common.buffers": ("common.distributed", "common.conversations"),
        "common.logging": (
            "common.files", "common.process", "common.settings", "common.cards", "common.distributed",
        ),
    },
    {
        "common.vlm": (),
        "common.vlm.images": (),
        "common.vlm.families": ("common.vlm.images",),
        "common.vlm.folder": (),
        "common.vlm.rows": ("common.vlm.images", "common.vlm.families"),
        "common.vlm.data": (
            "common.vlm.images", "common.vlm.families", "common.vlm.folder", "common.vlm.rows",
        ),
        "common.vlm.linear_attention": (),
        "common.vlm.attention": ("common.vlm.families", "common.vlm.linear_attention"),
        "common.vlm.model": (
            "common.vlm.families", "common.vlm.attention", "common.vlm.linear_attention",
        ),
        "common.vlm.layers": (),
        "common.vlm.compilation": (
            "common.vlm.attention", "common.vlm.linear_attention", "common.vlm.model",
        ),
        "common.graphs": (),
        "common.fsdp": (),
        "common.vlm.weights": (
            "common.vlm.families", "common.vlm.folder", "common.vlm.data", "common.vlm.attention",
            "common.vlm.linear_attention", "common.vlm.model", "common.vlm.layers",
            "common.vlm.compilation", "common.fsdp",
        ),
        "common.vlm.self_check": (
            "common.vlm.families", "common.vlm.attention", "common.vlm.linear_attention",
            "common.vlm.model", "common.fsdp", "common.vlm.weights",
        ),
        "common.staging": ("common.fsdp",),
        "common.storage": ("common.vlm.weights", "common.fsdp", "common.staging"),
        "common.checkpoint": (
            "common.vlm.weights", "common.fsdp", "common.staging", "common.storage",
        ),
        "common.vlm.replies": (
            "common.vlm.images", "common.vlm.rows", "common.vlm.data", "common.vlm.attention", "common.vlm.model",
        ),
        "common.memory": (
            "common.vlm.attention", "common.vlm.linear_attention", "common.vlm.model",
        ),
        "common.budget": ("common.vlm.attention", "common.memory"),
    },
    {
        "common.judge": (),
        "common.accuracy": ("common.judge",),
        "common.rules": ("common.judge",),
        "common.remote": (),
        "common.reward_functions": ("common.remote", "common.rules"),
        "common.transcripts": (),
        "common.reward_models": ("common.judge", "common.accuracy", "common.transcripts"),
        "common.rewards": ("common.reward_functions", "common.transcripts"),
        "common.environments": ("common.reward_functions",),
        "common.dialogue": ("common.environments",),
        "common.records": ("common.transcripts",),
        "common.audit": ("common.rewards",),
    },
    {
        "train_ppo_vl": (),
        "train_grm_vl": (),
        "launch.plan": ("train_ppo_vl", "train_grm_vl"),
    },
)
# What --help and refused flags import: the standard library and one another.
TORCH_FREE = ("common.files", "common.process", "common.flags", "common.settings")


# ---- Measuring


BRANCHES = (
    ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case, ast.Assert,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT,
)


@dataclass
class Source:
    """A file of the product, parsed once."""

    name: str  # relative to the root
    text: str
    tree: ast.Module = field(init=False)
    nodes: list[ast.AST] = field(init=False)

    def __post_init__(self):
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """As it is imported: common/vlm/data.py is common.vlm.data, a package's __init__.py the package."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def is_script(self) -> bool:
        return self.name in SCRIPTS

    @property
    def in_common(self) -> bool:
        return self.name.startswith("common/")

    def of(self, *kinds: type) -> list:
        return [node for node in self.nodes if isinstance(node, kinds)]


def read_product(root: Path) -> list[Source]:
    """Both scripts, launch/plan.py and all of common, where they exist and are not empty."""
    paths = [root / name for name in (*SCRIPTS, "launch/plan.py")] + sorted((root / "common").rglob("*.py"))
    sources = []
    for path in paths:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.strip():
            sources.append(Source(path.relative_to(root).as_posix(), text))
    return sources


def code_lines(source: Source) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor only comment nor docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in source.of(*FUNCTIONS, ast.ClassDef, ast.Module):
        if ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def complexity(function: ast.AST) -> int:
    """1, and 1 more for each branch: statement, conditional, clause of a comprehension, `and` or `or`."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def parameters(function: ast.AST) -> list[ast.arg]:
    """Those with names, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument for argument in named if argument.arg not in ("self", "cls")]


def is_truth(node: ast.expr) -> bool:
    """Whether an expression is surely a bool: a comparison, and/or/not, a call of bool."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "bool"
    return isinstance(node, (ast.Compare, ast.BoolOp))


def is_sequence(node: ast.expr) -> bool:
    """Whether an expression is surely a text, a tuple or a list."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.JoinedStr, ast.Tuple, ast.List))


def is_text_times_truth(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return isinstance(node.op, ast.Mult) and any(map(is_truth, sides)) and any(map(is_sequence, sides))


def names_of(annotation: ast.AST | None) -> set[str]:
    """The identifiers of an annotation, also of one written as text."""
    if annotation is None:
        return set()
    names = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= names_of(ast.parse(node.value, mode="eval"))
    return names


def takes_script_arguments(function: ast.AST) -> bool:
    """Whether a parameter is an Args or a Run, or is called so and is no settings such as CheckpointArgs."""
    for parameter in parameters(function):
        names = names_of(parameter.annotation)
        settings = any(name.endswith("Args") for name in names - {"Args"})
        if names & {"Args", "Run"} or (parameter.arg in ("args", "run") and not settings):
            return True
    return False


def declared_flags(node: ast.ClassDef) -> list[str]:
    """The fields of a class that are made by flag(...)."""
    names = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if getattr(function, "id", getattr(function, "attr", "")) == "flag":
                names.append(statement.target.id)
    return names


def flags_of_script(script: Source, sources: list[Source]) -> list[str]:
    """All flags of a script: its class Args has one field for each group, whose class may stand in common."""
    classes = {}
    for source in [*[source for source in sources if source.in_common], script]:
        for node in source.of(ast.ClassDef):
            classes[node.name] = node
    if "Args" not in classes:
        return []
    flags = []
    for statement in classes["Args"].body:
        if isinstance(statement, ast.AnnAssign):
            for name in names_of(statement.annotation) & classes.keys():
                flags += declared_flags(classes[name])
    return flags


# ---- Figures


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    name: str  # in GOALS
    where: str  # file, or file:function
    value: float
    detail: str = ""  # what was counted

    @property
    def what(self) -> str:
        return self.name.partition(": ")[2]

    @property
    def goal(self) -> float:
        return GOALS[self.name]

    @property
    def key(self) -> str:
        """Under which a ceiling is listed: functions each by name, everything else for all alike."""
        if self.name.startswith(("function: ", "formula: ")):
            function = self.where.partition(":")[2]
            return f"{function}(): {self.what}"
        return self.name


def measure_file(source: Source) -> list[Figure]:
    lines, code = source.text.splitlines(), code_lines(source)
    expressions = len(source.of(ast.expr))
    long = sum(len(lines[number - 1]) > 100 for number in code)
    lambdas = [x for x in source.of(ast.Assign, ast.AnnAssign) if isinstance(x.value, ast.Lambda)]
    loops = [x for x in source.of(ast.For) if isinstance(x.iter, ast.IfExp)]
    figures = {
        "expressions": expressions,
        "expressions per code line": round(expressions / max(1, len(code)), 2),
        "percent of code lines over 100 characters": round(100 * long / max(1, len(code)), 1),
        "characters of the longest line": max(map(len, lines), default=0),
        "named lambdas": len(lambdas),
        "loops over a conditional": len(loops),
        "texts times a truth value": sum(map(is_text_times_truth, source.of(ast.BinOp))),
    }
    found = []
    for what, value in figures.items():
        own = f"{source.name}: {what}"
        name = own if own in GOALS else f"file: {what}"
        found.append(Figure(name, source.name, value))
    return found


def qualified_functions(node: ast.AST, prefix: str = "") -> list[tuple[str, ast.AST]]:
    """Name and node of every function, with the classes around it: Class.method."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            found.append((prefix + child.name, child))
        inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
        found += qualified_functions(child, inner)
    return found


def measure_functions(source: Source) -> list[Figure]:
    is_formula = Path(source.name).name in FORMULAS
    found = []
    for name, function in qualified_functions(source.tree):
        where = f"{source.name}:{name}"
        kind = "main" if name == "main" and source.is_script else "function"
        found.append(Figure(f"{kind}: lines", where, function.end_lineno - function.lineno + 1))
        found.append(Figure(f"{kind}: complexity", where, complexity(function)))
        kind = "formula" if is_formula else "function"
        found.append(Figure(f"{kind}: parameters", where, len(parameters(function))))
    return found


def measure_script(script: Source, sources: list[Source]) -> list[Figure]:
    imported, from_common, taking_run = 0, 0, 0
    for node in script.of(ast.Import, ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        imported += len(node.names)
        from_common += len(node.names) if module.split(".")[0] == "common" else 0
    for function in script.of(*FUNCTIONS):
        taking_run += "run" in [parameter.arg for parameter in parameters(function)]
    return [
        Figure("script: imported names", script.name, imported),
        Figure("script: names imported from common", script.name, from_common),
        Figure("script: functions that take run", script.name, taking_run),
        Figure(f"{script.name}: flags", script.name, len(flags_of_script(script, sources))),
    ]


def measure_product(sources: list[Source], readme: str) -> list[Figure]:
    nested, declared, taking = 0, [], []
    for source in sources:
        functions = source.of(*FUNCTIONS)
        for function in functions:
            nested += sum(isinstance(node, FUNCTIONS) for node in ast.walk(function)) - 1
        for node in source.of(ast.ClassDef):
            declared += declared_flags(node)
        if source.in_common:
            found = filter(takes_script_arguments, functions)
            taking += [f"{source.name}:{function.name}" for function in found]
    twice = sorted({f"--{flag}" for flag in declared if declared.count(flag) > 1})
    expressions = sum(len(source.of(ast.expr)) for source in sources)
    return [
        Figure("product: expressions", "product", expressions),
        Figure("product: nested functions", "product", nested),
        Figure("product: flags declared twice", "product", len(twice), ", ".join(twice)),
        Figure("common: functions that take a script's arguments", "common", len(taking), ", ".join(taking)),
        Figure("README.md: words", "README.md", len(readme.split())),
    ]


def measure(sources: list[Source], readme: str) -> list[Figure]:
    figures = measure_product(sources, readme)
    for source in sources:
        figures += measure_file(source) + measure_functions(source)
        if source.is_script:
            figures += measure_script(source, sources)
    return figures


Ceilings = dict[str, tuple[float, float]]


def over(figures: list[Figure], ceilings: Ceilings) -> list[str]:
    """One line for each figure above its ceiling, or above its goal where it has none."""
    lines = []
    for figure in figures:
        ceiling, _ = ceilings.get(figure.key, (figure.goal, figure.goal))
        if figure.value > ceiling:
            limit = f"goal {figure.goal:g}"
            if ceiling > figure.goal:
                limit = f"ceiling {ceiling:g}, {limit}"
            detail = f" ({figure.detail})" if figure.detail else ""
            lines.append(f"{figure.where}: {figure.value:g} {figure.what}, {limit}{detail}")
    return lines


def tighten(figures: list[Figure], ceilings: Ceilings) -> Ceilings:
    """The ceilings lowered to what is measured, without figures that have reached their goal or are gone."""
    lowered = {}
    for figure in figures:
        if figure.key in ceilings and figure.value > figure.goal:
            largest = max(figure.value, lowered.get(figure.key, (0, 0))[0])
            lowered[figure.key] = (min(largest, ceilings[figure.key][0]), figure.goal)
    return {name: lowered[name] for name in ceilings if name in lowered}


# ---- Imports


def imported_modules(source: Source) -> set[str]:
    """Full names of all that a file imports; of `from a import b` both a and a.b, which may be a module."""
    found = set()
    package = source.module if source.name.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in source.of(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
            continue
        base = node.module or ""
        if node.level:
            parents = package.split(".")[:len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, base]).rstrip(".")
        found |= {base} | {f"{base}.{name.name}" for name in node.names}
    return found


def imported_rooms(source: Source, modules: set[str]) -> set[str]:
    """What a file imports of the project; a package only where none of its modules is meant."""
    found = imported_modules(source)
    rooms = {name for name in found if name in modules or name.split(".")[0] in ("launch", "tests")}
    packages = {name for name in rooms if any(other.startswith(f"{name}.") for other in rooms)}
    return rooms - packages - {source.module}


def floor_of(room: str) -> int | None:
    for number, floor in enumerate(FLOORS):
        if room in floor:
            return number
    return None


def wrong_imports(sources: list[Source]) -> list[str]:
    """One line for each import that goes up, or sideways without leave, and each module without a floor."""
    modules, lines = {source.module for source in sources}, []
    for source in sources:
        own = floor_of(source.module)
        if own is None:
            if imported_modules(source) or not source.name.endswith("__init__.py"):
                lines.append(f"{source.name}: is not in FLOORS")
            continue
        for other in sorted(imported_rooms(source, modules)):
            if other.startswith(f"{source.module}."):
                continue  # a package may re-export what it holds
            floor = floor_of(other)
            if floor is None:
                lines.append(f"{source.name}: imports {other}, which is not in FLOORS")
            elif floor > own:
                lines.append(f"{source.name}: imports {other}, which is above it")
            elif floor == own and other not in FLOORS[own].get(source.module, ()):
                lines.append(f"{source.name}: imports {other}, which is on its own floor and not open to it")
    return lines


# ---- The project


@pytest.fixture(scope="module")
def product() -> list[Source]:
    return read_product(ROOT)


@pytest.fixture(scope="module")
def figures(product) -> list[Figure]:
    return measure(product, (ROOT / "README.md").read_text(encoding="utf-8"))


def test_no_figure_is_above_its_ceiling(figures):
    assert over(figures, CEILINGS) == []


def test_ceilings_are_of_something_that_is_still_above_its_goal(figures):
    tightened = tighten(figures, CEILINGS)
    reached = sorted(CEILINGS.keys() - tightened.keys())
    assert reached == [], "at their goals, or gone: python tests/test_architecture.py --tighten"
    for name, (_, goal) in CEILINGS.items():
        assert goal == tightened[name][1], f"{name}: the goal beside the ceiling is not that of GOALS"


def test_imports_go_down(product):
    assert wrong_imports(product) == []


def test_flags_need_no_torch(product):
    for source in product:
        if source.module in TORCH_FREE:
            packages = {name.split(".")[0] for name in imported_modules(source)} - {"common"}
            assert packages <= sys.stdlib_module_names, source.name
            assert imported_rooms(source, {other.module for other in product}) <= set(TORCH_FREE), source.name


def test_no_floor_allows_a_circle():
    """A module may import only those that are listed before it."""
    for floor in FLOORS:
        seen = set()
        for room, opened in floor.items():
            assert set(opened) <= seen, room
            seen.add(room)


# ---- Every rule is violated once


def hundreds(count: int) -> str:
    """So many lines of 100 expressions: 98 numbers, their list and its name."""
    return f"x = [{'1, ' * 98}]\n" * count


DENSE = "x = f(a, b)[c] + g(d, e)[h] + i(j, k)[l] + m(n, o)[p]\n" * 3
LONG = "def f():\n" + "    x = 1\n" * 50
BRANCHED = "def f(a):\n" + "    if a:\n        pass\n" * 15
MAIN_LONG = "def main():\n" + "    x = 1\n" * 80
MAIN_BRANCHED = "def main(a):\n" + "    if a:\n        pass\n" * 13
NESTED = "def f():\n" + "".join(f"    def g{i}():\n        pass\n" for i in range(13))
FLAG = "class OtherArgs:\n    lr: float = flag(1.0, 'learning rate')\n"
TWO_FLAGS = FLAG + "class Args:\n    update: OtherArgs\n"
IMPORTS = "from common.losses import " + ", ".join(f"a{i}" for i in range(26)) + "\n"
MANY_FLAGS = ("class UpdateArgs:\n" + "".join(f"    a{i}: int = flag({i}, 'help')\n" for i in range(61))
              + "class Args:\n    update: UpdateArgs\n")
VIOLATIONS = [
    ("common/losses.py", DENSE, "common/losses.py: 28 expressions per code line, goal 6.5"),
    ("common/losses.py", hundreds(24), "common/losses.py: 2400 expressions, goal 2300"),
    ("train_grm_vl.py", hundreds(33), "train_grm_vl.py: 3300 expressions, goal 3200"),
    ("train_ppo_vl.py", hundreds(81), "train_ppo_vl.py: 8100 expressions, goal 8000"),
    ("train_ppo_vl.py", hundreds(361), "product: 36100 expressions, goal 36000"),
    ("common/losses.py", f"x = '{'a' * 100}'\n",
     "common/losses.py: 100 percent of code lines over 100 characters, goal 8"),
    ("common/losses.py", f"# {'a' * 110}\n",
     "common/losses.py: 112 characters of the longest line, goal 110"),
    ("common/losses.py", LONG, "common/losses.py:f: 51 lines, goal 50"),
    ("common/losses.py", BRANCHED, "common/losses.py:f: 16 complexity, goal 15"),
    ("common/losses.py", f"def f({', '.join('abcdefghij')}):\n    pass\n",
     "common/losses.py:f: 10 parameters, goal 9"),
    ("common/flags.py", "class A:\n    def f(self, a, b, c, d, e, *, g, h):\n        pass\n",
     "common/flags.py:A.f: 7 parameters, goal 6"),
    ("train_ppo_vl.py", MAIN_LONG, "train_ppo_vl.py:main: 81 lines, goal 80"),
    ("train_ppo_vl.py", MAIN_BRANCHED, "train_ppo_vl.py:main: 14 complexity, goal 13"),
    ("train_ppo_vl.py", IMPORTS, "train_ppo_vl.py: 26 names imported from common, goal 25"),
    ("train_ppo_vl.py", IMPORTS.replace("common", "torch") * 2,
     "train_ppo_vl.py: 52 imported names, goal 45"),
    ("train_ppo_vl.py", "def f(run):\n    pass\n", "train_ppo_vl.py: 1 functions that take run, goal 0"),
    ("train_grm_vl.py", MANY_FLAGS, "train_grm_vl.py: 61 flags, goal 60"),
    ("common/fsdp.py", "f = lambda x: x\n", "common/fsdp.py: 1 named lambdas, goal 0"),
    ("common/fsdp.py", "for x in (1,) if a else ():\n    pass\n",
     "common/fsdp.py: 1 loops over a conditional, goal 0"),
    ("common/fsdp.py", "x = 'text' * (a > b)\n", "common/fsdp.py: 1 texts times a truth value, goal 0"),
    ("common/fsdp.py", "x = bool(a) * [b]\n", "common/fsdp.py: 1 texts times a truth value, goal 0"),
    ("common/fsdp.py", NESTED, "product: 13 nested functions, goal 12"),
    ("common/fsdp.py", "def f(args: Args):\n    pass\n",
     "common: 1 functions that take a script's arguments, goal 0 (common/fsdp.py:f)"),
    ("common/fsdp.py", "def f(given: 'script.Args | None'):\n    pass\n",
     "common: 1 functions that take a script's arguments, goal 0 (common/fsdp.py:f)"),
    ("common/fsdp.py", "def f(run):\n    pass\n",
     "common: 1 functions that take a script's arguments, goal 0 (common/fsdp.py:f)"),
    ("common/fsdp.py", FLAG + FLAG.replace("Other", "Further"),
     "product: 1 flags declared twice, goal 0 (--lr)"),
]


@pytest.mark.parametrize("name, text, line", VIOLATIONS, ids=[line for _, _, line in VIOLATIONS])
def test_a_violation_is_found(name, text, line):
    assert line in over(measure([Source(name, text)], ""), {})


def test_words_of_the_readme_are_counted():
    assert over(measure([], "word " * 2801), {}) == ["README.md: 2801 words, goal 2800"]


def test_what_is_within_the_goals_is_not_a_violation():
    """Each of these looks like a violation and is none."""
    text = textwrap.dedent('''\
        """A docstring is no code, however long its lines are: it is neither dense nor among the long ones."""
        import os

        class FsdpArgs:
            lr: float = flag(1.0, "learning rate")

        def adamw(args: FsdpArgs, names, *run):
            """The arguments are its own; a star is no parameter."""
            for name in names:
                print(name * 2, "-" * 80, sorted(names, key=lambda x: x))
            return args
    ''')
    source = Source("common/fsdp.py", text)
    assert over(measure([source], "few words"), {}) == []
    assert wrong_imports([source]) == []


def test_flags_of_a_group_in_common_are_flags_of_the_script():
    script = Source("train_ppo_vl.py", "class Args:\n    checkpoint: flags.OtherArgs\n    name: str\n")
    assert flags_of_script(script, [script, Source("common/flags.py", FLAG)]) == ["lr"]


def test_flags_of_both_scripts_are_compared():
    sources = [Source(name, TWO_FLAGS) for name in SCRIPTS]
    assert "product: 1 flags declared twice, goal 0 (--lr)" in over(measure(sources, ""), {})


def test_a_ceiling_holds_and_can_only_be_lowered():
    long = measure([Source("common/fsdp.py", LONG + "    x = 1\n" * 10)], "")
    assert over(long, {"f(): lines": (61, 50)}) == []
    assert over(long, {"f(): lines": (60, 50)}) == ["common/fsdp.py:f: 61 lines, ceiling 60, goal 50"]
    assert tighten(long, {"f(): lines": (99, 50)}) == {"f(): lines": (61, 50)}
    assert tighten(long, {"f(): lines": (60, 50)}) == {"f(): lines": (60, 50)}
    assert tighten(long, {}) == {} and start(long) == {"f(): lines": (61, 50)}
    assert tighten(measure([Source("common/fsdp.py", "x = 1\n")], ""), {"f(): lines": (61, 50)}) == {}


WRONG_IMPORTS = [
    ("common/flags.py", "from common.checkpoint import x",
     "common/flags.py: imports common.checkpoint, which is above it"),
    ("common/flags.py", "def f():\n    from common import rewards",
     "common/flags.py: imports common.rewards, which is above it"),
    ("common/flags.py", "import train_ppo_vl as ppo",
     "common/flags.py: imports train_ppo_vl, which is above it"),
    ("common/flags.py", "from launch import toy",
     "common/flags.py: imports launch.toy, which is not in FLOORS"),
    ("common/flags.py", "from .vlm.data import x",
     "common/flags.py: imports common.vlm.data, which is above it"),
    ("common/vlm/data.py", "from . import weights",
     "common/vlm/data.py: imports common.vlm.weights, which is on its own floor and not open to it"),
    ("common/vlm/images.py", "from common.vlm import families",
     "common/vlm/images.py: imports common.vlm.families, which is on its own floor and not open to it"),
    ("train_grm_vl.py", "import train_ppo_vl",
     "train_grm_vl.py: imports train_ppo_vl, which is on its own floor and not open to it"),
    ("common/misc.py", "", "common/misc.py: is not in FLOORS"),
]


@pytest.mark.parametrize("name, text, line", WRONG_IMPORTS, ids=[line for _, _, line in WRONG_IMPORTS])
def test_a_wrong_import_is_found(name, text, line):
    rooms = [room for floor in FLOORS for room in floor if room != Source(name, "").module]
    others = [Source(room.replace(".", "/") + ".py", "x = 1\n") for room in rooms]
    assert wrong_imports([*others, Source(name, text + "\nx = 1\n")]) == [line]


def test_a_package_may_re_export_its_modules():
    """And who imports a name by way of the package imports the package."""
    package = Source("common/vlm/__init__.py", "from common.vlm.data import Prompt\n")
    data = Source("common/vlm/data.py", "from common.vlm.images import x\nfrom common import distributed\n")
    images = Source("common/vlm/images.py", "from common.vlm import Prompt\n")
    ground = Source("common/distributed.py", "import torch\n")
    assert wrong_imports([package, data, ground]) == []
    assert wrong_imports([package, data, ground, images]) == [
        "common/vlm/images.py: imports common.vlm, which is on its own floor and not open to it"]


# ---- As a program


def write_table(table: Ceilings, path: Path) -> None:
    """Put the table where CEILINGS stands in this file."""
    head, _, rest = path.read_text(encoding="utf-8").partition("\nCEILINGS = {\n")
    tail = rest.partition("}  # end of CEILINGS\n")[2]
    lines = [f'    "{name}": ({ceiling:_g}, {goal:_g}),\n' for name, (ceiling, goal) in table.items()]
    written = "\nCEILINGS = {\n" + "".join(lines) + "}  # end of CEILINGS\n"
    path.write_text(head + written + tail, encoding="utf-8")


def start(figures: list[Figure]) -> Ceilings:
    """The ceilings at which a ratchet starts: all that is above its goal, functions last."""
    largest = {}
    for figure in figures:
        if figure.value > figure.goal:
            old, _ = largest.get(figure.key, (0, 0))
            largest[figure.key] = (max(old, figure.value), figure.goal)
    whole = [name for name in GOALS if name in largest]
    functions = sorted(largest.keys() - whole, key=lambda name: (name.partition(": ")[2], name))
    return {name: largest[name] for name in [*whole, *functions]}


def main() -> int:
    sources = read_product(ROOT)
    found = measure(sources, (ROOT / "README.md").read_text(encoding="utf-8"))
    if sys.argv[1:] in (["--tighten"], ["--start"]):
        table = start(found) if "--start" in sys.argv else tighten(found, CEILINGS)
        write_table(table, Path(__file__))
        return 0
    lines = over(found, {}) + wrong_imports(sources)
    print("\n".join(lines) if lines else "everything is within the goal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

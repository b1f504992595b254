"""What a tool can see: names that mean one thing, small constructors, callbacks that are there, plain English."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[3]
_MOST_PARAMETERS = 8
# Of a dataclass that is not frozen: its constructor takes as many, and all of them may change.
_MOST_FIELDS = 15

_NO_OPENING = re.compile(
    "of|that|which|what|who|whom|whose|where|with|without|under|as|to|in|by|for|from|on|at|between|those|these|it|they|"
    "one|both|all|each|some|there|so|such|among|beside|beneath|until|while|lest"
)
_PARAMETER = re.compile(r"[a-z_][a-z0-9_]*(, [a-z_][a-z0-9_]*)*: ")
# Old-fashioned words, and "said" where it stands for "named" or "given".
_BANNED = re.compile(
    r"\b(lest|whoever|whomever|thereof|hourglass|nobody's|for want of)\b|\bsaid\b(?! to)", re.IGNORECASE
)

# The nodes of each.
Modules = Mapping[str, Sequence[ast.AST]]
# The file, the place in it, and what is wrong there.
Violations = Iterator[tuple[str, ast.stmt | ast.expr, str]]
Rule = Callable[[Modules], Violations]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Assignment = ast.Assign | ast.AnnAssign
_Node = TypeVar("_Node", bound=ast.AST)


@pytest.fixture(scope="module")
def modules() -> Iterator[Modules]:
    gc.disable()  # millions of nodes, all of which stay: looking for garbage among them takes longer than parsing
    yield {
        str(path.relative_to(ROOT)): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for base in ("libs/bottega", "services/bottega", "kernels/bottega", "deploy")
        for path in sorted((ROOT / base).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    }
    gc.enable()


def a_name_of_two_classes_is_explained(modules: Modules) -> Violations:
    """Rename one, or say in each docstring why both have the same name."""
    found: defaultdict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for path, node in _all(modules, ast.ClassDef):
        found[node.name].append((path, node))
    for name, places in found.items():
        for path, node in places if len(places) > 1 else ():
            if "same name" not in (ast.get_docstring(node) or ""):
                yield path, node, name


def a_constructor_takes_at_most_eight_parameters(modules: Modules) -> Violations:
    """Give what belongs together a value of its own."""
    for path, node in _all(modules, ast.ClassDef):
        for made in _methods(node, "__init__"):
            count = len([*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]) - 1
            if count > _MOST_PARAMETERS:
                yield path, made, f"{node.name}: {count} parameters"


def a_dataclass_of_many_fields_is_frozen(modules: Modules) -> Violations:
    """Give what belongs together a value of its own, or say in the docstring why it has "many fields"."""
    for path, node in _all(modules, ast.ClassDef):
        kinds = [ast.unparse(each) for each in node.decorator_list if ast.unparse(each).startswith("dataclass")]
        count = sum(isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.dump(each) for each in node.body)
        explained = "many fields" in (ast.get_docstring(node) or "")
        if kinds and "frozen=True" not in kinds[0] and count > _MOST_FIELDS and not explained:
            yield path, node, f"{node.name}: {count} fields"


def a_return_is_no_tuple_of_which_parts_may_be_missing(modules: Modules) -> Violations:
    """Return a value with names, or a union of values."""
    for path, node in _functions(modules):
        if node.returns is not None and re.fullmatch(r"tuple\[.*\| None.*\]", ast.unparse(node.returns)):
            yield path, node, f"{node.name} -> {ast.unparse(node.returns)}"


def a_docstring_says_it_itself(modules: Modules) -> Violations:
    """What only points to another docstring needs none."""
    for path, node in (*_functions(modules), *_all(modules, ast.ClassDef)):
        if (ast.get_docstring(node) or "").startswith("See "):
            yield path, node, node.name


def a_docstring_opens_with_a_noun_or_a_verb(modules: Modules) -> Violations:
    """Open with a noun (classes) or a verb (functions): no preposition, pronoun, conjunction or parameter."""
    for path, node in (*_functions(modules), *_all(modules, ast.ClassDef)):
        text = ast.get_docstring(node) or "-"
        first = text.split(maxsplit=1)[0].strip(",.;:").lower()
        if _NO_OPENING.fullmatch(first) or _PARAMETER.match(text):
            yield path, node, repr(text[:60])


def a_callback_is_given_to_the_constructor(modules: Modules) -> Violations:
    """What is called is there from the beginning: a parameter of the constructor or of the method that calls it."""
    callables = {"Callable"} | {
        target.id
        for _, node in _all(modules, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and ast.unparse(node.value).startswith("Callable[")
    }
    replaceable = {
        name
        for _, node in _all(modules, ast.ClassDef)
        for assignment in _initial(node)
        for name in _attributes(assignment, of_self=True) or _names(assignment)
        if _is_empty_callback(assignment, callables)
    }
    for path, assigned in _all(modules, ast.Assign):
        for name in _attributes(assigned, of_self=False):
            if name in replaceable:
                yield path, assigned, f"{name} is set from outside"
    for path, node in _all(modules, ast.ClassDef):
        for method in node.body:
            if isinstance(method, _Function) and method.name != "__init__":
                yield from ((path, *found) for found in _kept_callbacks(method, callables, replaceable))


def _is_empty_callback(assignment: _Assignment, callables: set[str]) -> bool:
    """Whether it says that nothing is called, for now."""
    if assignment.value is None or isinstance(assignment, ast.Assign):
        return isinstance(assignment.value, ast.Lambda)
    defaults = [each.value for each in ast.walk(assignment.value) if isinstance(each, ast.keyword)]
    nothing = any(isinstance(each, ast.Lambda) or ast.unparse(each) == "None" for each in (assignment.value, *defaults))
    return nothing and _mentions(assignment.annotation, callables)


def _kept_callbacks(method: _Function, callables: set[str], replaceable: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Parameters of a method that are callbacks and become attributes which had none before."""
    parameters = (*method.args.args, *method.args.kwonlyargs)
    given = {each.arg for each in parameters if each.annotation and _mentions(each.annotation, callables)}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in given:
            yield from ((node, f"{name} is set by {method.name}") for name in _attributes(node, of_self=True))


def a_lambda_of_a_constructor_names_what_is_there(modules: Modules) -> Violations:
    """Assign what it names first: until then whoever calls it gets an AttributeError."""
    for path, node in _all(modules, ast.ClassDef):
        for made in _methods(node, "__init__"):
            assigned = [(each.lineno, name) for each in _assignments(made) for name in _attributes(each, of_self=True)]
            first = {name: line for line, name in sorted(assigned, reverse=True)}
            for early in (each for each in ast.walk(made) if isinstance(each, ast.Lambda)):
                for name in _read_of_self(early):
                    if first.get(name, 0) > early.lineno:
                        yield path, early, f"self.{name} is assigned in line {first[name]}"


def a_function_does_not_call_itself_to_try_again(modules: Modules) -> Violations:
    """Try again in a loop: its attempts are bounded in one place, and its stack does not grow."""
    for path, node in _functions(modules):
        for handler in (each for each in ast.walk(node) if isinstance(each, ast.ExceptHandler)):
            for call in (each for each in ast.walk(handler) if isinstance(each, ast.Call)):
                if ast.unparse(call.func) in {node.name, f"self.{node.name}", f"cls.{node.name}"}:
                    yield path, call, f"{node.name} calls itself"


# What still breaks a rule, and is not to become more.
REMAINING: Mapping[Rule, frozenset[str]] = {
    a_dataclass_of_many_fields_is_frozen: frozenset({"EngineJob", "JobLoras", "Member"}),
    a_callback_is_given_to_the_constructor: frozenset({"_give_back"}),
}
# What breaks a rule, in the lines that say so.
PLANTED: Mapping[Rule, str] = {
    a_name_of_two_classes_is_explained: """
class One: ...  # broken
class One: ...  # broken
class Two: ...
""",
    a_constructor_takes_at_most_eight_parameters: """
class One:
    def __init__(self, a, b, c, d, e, *, f, g, h, i): ...  # broken
class Two:
    def __init__(self, a, b, c, d, e, *, f, g, h): ...
""",
    a_dataclass_of_many_fields_is_frozen: f"""
@dataclass(slots=True)
class One:  # broken
    {"; ".join(f"field_{number}: int" for number in range(_MOST_FIELDS + 1))}
@dataclass(frozen=True)
class Two:
    {"; ".join(f"field_{number}: int" for number in range(_MOST_FIELDS + 1))}
""",
    a_return_is_no_tuple_of_which_parts_may_be_missing: """
def one() -> tuple[int, str | None]: ...  # broken
def two() -> tuple[int, str] | None: ...
""",
    a_docstring_says_it_itself: """
def one():  # broken
    'See `two`.'
def two():
    'Sees.'
""",
    a_docstring_opens_with_a_noun_or_a_verb: """
class One:  # broken
    "Of a request."
class Two:  # broken
    "first, last: rows."
class Three:
    "Jobs by id: the newest first."
def one():  # broken
    "What a worker holds."
def two():
    "Return the share."
""",
    a_callback_is_given_to_the_constructor: """
Report = Callable[[int], None]
class One:
    def __init__(self, report: Report):
        self.on_end: Report | None = None
        self.on_start = lambda: None
        self._first = report
    def watch(self, report: Report):
        self._report = report  # broken
@dataclass
class Two:
    on_news: Report = field(default=lambda number: None)
def wire(one, two):
    one.on_end = print  # broken
    one.on_start = print  # broken
    two.on_news = print  # broken
    one.name = "one"
""",
    a_lambda_of_a_constructor_names_what_is_there: """
class One:
    def __init__(self):
        self._earlier = Earlier()
        self._other = Other(lambda: self._later.close())  # broken
        self._another = Other(lambda: self._earlier.close())
        self._later = Later()
""",
    a_function_does_not_call_itself_to_try_again: """
class One:
    def send(self):
        try:
            self._send()
        except OSError:
            self.send()  # broken
        self.send()
""",
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(modules: Modules, rule: Rule) -> None:
    remaining = REMAINING.get(rule, frozenset())
    broken = [
        f"{path}:{node.lineno}: {what}"
        for path, node, what in rule(modules)
        if not remaining.intersection(re.findall(r"\w+", what))
    ]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_rule_sees_what_breaks_it(rule: Rule) -> None:
    lines = PLANTED[rule].splitlines()
    broken = {number for number, line in enumerate(lines, 1) if line.endswith("# broken")}
    assert {node.lineno for _, node, _ in rule({"planted.py": list(ast.walk(ast.parse(PLANTED[rule])))})} == broken


def test_banned_words_do_not_occur(modules: Modules) -> None:
    found = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path in modules
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if _BANNED.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_code_is_where_this_test_looks(modules: Modules) -> None:
    assert len(modules) > 300


def _all(modules: Modules, kind: type[_Node]) -> Iterator[tuple[str, _Node]]:
    for path, nodes in modules.items():
        yield from ((path, node) for node in nodes if isinstance(node, kind))


def _functions(modules: Modules) -> Iterator[tuple[str, _Function]]:
    yield from _all(modules, ast.FunctionDef)
    yield from _all(modules, ast.AsyncFunctionDef)


def _methods(node: ast.ClassDef, name: str) -> Iterator[ast.FunctionDef]:
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name)


def _initial(node: ast.ClassDef) -> Iterator[_Assignment]:
    """What the class and its constructor assign."""
    yield from (each for each in node.body if isinstance(each, _Assignment))
    for made in _methods(node, "__init__"):
        yield from _assignments(made)


def _assignments(node: ast.AST) -> Iterator[_Assignment]:
    yield from (each for each in ast.walk(node) if isinstance(each, _Assignment))


def _targets(node: _Assignment) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _attributes(node: _Assignment, *, of_self: bool) -> list[str]:
    """Names of attributes that it assigns: of self, or of anything else."""
    return [
        each.attr
        for each in _targets(node)
        if isinstance(each, ast.Attribute) and (ast.unparse(each.value) == "self") is of_self
    ]


def _names(node: _Assignment) -> list[str]:
    return [each.id for each in _targets(node) if isinstance(each, ast.Name)]


def _read_of_self(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


def _mentions(annotation: ast.expr, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(annotation))

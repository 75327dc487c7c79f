"""The methods of a class with other calls in them: a function of ours in the place of some of PyTorch's.

A copy of a method is compiled from its source, in which ``F.linear(x, w)`` has become ``ours(self, 0, x, w)``, and
``a * b`` likewise. Which function a name means is looked up in the method's globals, so ``F``, ``nn.functional``,
``torch`` and names that were imported are the same. Everything else is the method's own: its globals are those that it
has, its defaults and decorators too, and calls that are not replaced cost nothing. A compiler traces it as any code.

The source must be that of the method: compiled without a change, it must give the method's own instructions. Where it
does not, as of code without a file or that a tool has changed, the method stays as it is. Functions inside of a method,
those that it calls in turn, and what runs without gradients stay so too.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

_FLAGS = functools.reduce(
    lambda a, b: a | b, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
_OPERATORS = {ast.Mult: "*", ast.MatMult: "@"}
_OLD_OPERATORS = {"BINARY_MULTIPLY": "*", "BINARY_MATRIX_MULTIPLY": "@"}  # instructions of Python 3.10
_LOOPS = ast.For | ast.While | ast.AsyncFor | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


class Site(NamedTuple):
    """A call that is replaced."""

    name: str  # of the function, as "linear", or of the operator, "*" or "@"
    # Of each operand of an operator, the name of the module's attribute that it is made of alone, or None
    own: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Calls:
    """What is replaced: functions by themselves, methods of tensors by their names; and the functions of ours."""

    functions: Mapping[Any, str]
    methods: Mapping[str, str]
    ours: Mapping[str, Callable[..., Any]]


class OwnCode(NamedTuple):
    """The methods of a class with calls replaced, by name; the calls; why some methods stay as they are."""

    methods: dict[str, Callable[..., Any]]
    sites: list[Site]
    left: dict[str, str]


def own_code(kind: type[nn.Module], calls: Calls) -> OwnCode:
    """Replace calls in the methods of a class, and of those of the same file that it is derived from."""
    found = OwnCode({}, [], {})
    place = next((one.__module__ for one in kind.__mro__ if "forward" in vars(one)), "")
    seen, reached = set[str](), _reached(kind)
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "builtins") or owner.__module__ not in (
            place,
            kind.__module__,
        ):
            continue
        for name, method in vars(owner).items():
            if name in seen or name not in reached or not isinstance(method, FunctionType):
                continue
            seen.add(name)
            inner = inspect.unwrap(method)
            if not isinstance(inner, FunctionType) or not _may_call(inner, calls):
                continue
            sites = list[Site]()
            try:
                changed = _Changed(inner, owner.__name__, calls, len(found.sites), sites).function()
                if sites:
                    found.methods[name] = _decorated(method, inner, changed)
                    found.sites.extend(sites)
            except (OSError, TypeError, SyntaxError, ValueError) as error:
                if _has_name(inner, calls):
                    found.left[name] = str(error)
    return found


def _reached(kind: type[nn.Module]) -> set[str]:
    """Return the methods that a class's forward calls for what they return, and those that these call."""
    found, names = set[str](), ["forward"]
    while names:
        name = names.pop()
        if name in found or name.startswith("__"):
            continue
        found.add(name)
        inner = inspect.unwrap(getattr(kind, name, None))  # pyright: ignore[reportArgumentType]
        try:
            tree, _ = _tree_of(inner.__code__)  # pyright: ignore[reportFunctionMemberAccess]
        except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
            continue
        ignored = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        called = (one.func for one in ast.walk(tree) if isinstance(one, ast.Call) and id(one) not in ignored)
        names += [one.attr for one in called if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    return found


def _tree_of(code: CodeType) -> tuple[ast.FunctionDef, list[str]]:
    """Return a function's part of its file's syntax tree, to be changed, and what the file imports."""
    lines, _ = inspect.findsource(code)
    tree, imported = _file("".join(lines))
    for one in ast.walk(tree):
        is_named = isinstance(one, ast.FunctionDef) and one.name == code.co_name
        if is_named and min(each.lineno for each in (one, *one.decorator_list)) == code.co_firstlineno:  # pyright: ignore
            return copy.deepcopy(one), imported  # pyright: ignore[reportReturnType]
    raise ValueError("its source is not what runs")


def _has_name(function: FunctionType, calls: Calls) -> bool:
    names = {getattr(one, "__name__", "") for one in calls.functions} | calls.methods.keys()
    return not names.isdisjoint(function.__code__.co_names)


def _may_call(function: FunctionType, calls: Calls) -> bool:
    """Say whether a function's code has one of these names, or an operator."""
    code = function.__code__
    generator = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if code.co_flags & generator or not code.co_argcount:
        return False
    operators = (_OLD_OPERATORS.get(one.opname, one.argrepr) for one in dis.get_instructions(code))
    return _has_name(function, calls) or not {*_OPERATORS.values()}.isdisjoint(operators)


def _decorated(function: Any, inner: FunctionType, changed: FunctionType) -> Callable[..., Any]:
    """Return a function like one that calls an inner one, with another inner one."""
    if function is inner:
        return changed
    wrapped = function.__wrapped__
    made = _decorated(wrapped, inner, changed)
    cells = [one for one in function.__closure__ or () if one.cell_contents is wrapped]
    if not isinstance(function, FunctionType) or not cells:
        raise ValueError("a decorator hides its code")
    closure = tuple(CellType(made) if one in cells else one for one in function.__closure__ or ())
    return _like(function, function.__code__, closure, {**vars(function), "__wrapped__": made})


def _like(
    function: FunctionType, code: CodeType, closure: tuple[CellType, ...], fields: Mapping[str, Any]
) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
    )
    made.__module__, made.__annotations__ = function.__module__, function.__annotations__
    vars(made).update(fields)
    return made


class _Changed(ast.NodeTransformer):
    """Changes the syntax tree of a function."""

    def __init__(self, function: FunctionType, owner: str, calls: Calls, first: int, sites: list[Site]) -> None:
        self.original, self.owner, self.calls, self.first, self.sites = function, owner, calls, first, sites
        self.code = function.__code__
        self.local = {*self.code.co_varnames, *self.code.co_cellvars}
        self.cells, self.carried = dict[str, Callable[..., Any]](), False
        self.made: set[str] | None = None  # in a loop, the names that were assigned in it before

    def function(self) -> FunctionType:
        """Return the function with calls replaced; its sites are noted."""
        original = self.original
        tree = self._tree()
        if any("no_grad" in ast.unparse(one) for one in tree.decorator_list):
            return original
        if not _is_same(self._compiled(tree, ()), self.code):
            raise ValueError("its source is not what runs")
        self_name = self.code.co_varnames[0]
        written = (one for one in ast.walk(tree) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load))
        if any(one.id == self_name for one in written):
            return original
        tree = self._tree()
        self.values = _Values(tree)
        tree.body = [self.visit(one) for one in tree.body]
        if not self.sites:
            return original
        code = self._compiled(tree, tuple(self.cells))
        own = dict(zip(self.code.co_freevars, original.__closure__ or (), strict=True))
        closure = tuple(own[name] if name in own else CellType(self.cells[name]) for name in code.co_freevars)
        return _like(original, code, closure, vars(original))

    def _tree(self) -> ast.FunctionDef:
        tree, self.imported = _tree_of(self.code)
        return tree

    def _compiled(self, tree: ast.FunctionDef, cells: Sequence[str]) -> CodeType:
        """Compile the function inside of one that has its free variables, in a class, for the names that begin so."""
        names = ", ".join((*self.code.co_freevars, *cells))
        module = ast.parse(f"class {self.owner}:\n def outer({names}): pass")
        kind: Any = module.body[0]
        kind.body[0].body, tree.decorator_list = [tree], []
        imports = [ast.Import([ast.alias(name) for name in self.imported])] if self.imported else []
        module.body[:0] = imports  # methods of what is imported are called by other instructions
        ast.fix_missing_locations(module)
        flags = self.code.co_flags & _FLAGS
        code = compile(module, self.code.co_filename, "exec", flags, dont_inherit=True)
        for name in (self.owner, "outer", self.code.co_name):
            code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
        return code

    def visit(self, node: ast.AST) -> Any:
        """Change a part of the tree, but no functions inside of it, nor what runs without gradients."""
        if isinstance(node, _INNER):
            return node
        if isinstance(node, ast.With) and any("no_grad" in ast.unparse(one.context_expr) for one in node.items):
            return node
        before, written = (self.made, self.carried), set[str]()
        if isinstance(node, _LOOPS):
            self.made = set[str]()
        elif isinstance(node, ast.Assign) and self.made is not None:
            written = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            read = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
            # Of a recurrence: many steps, each on what the last one has made.
            self.carried = bool(written & read - self.made)
        try:
            return super().visit(node)
        finally:
            if not isinstance(node, _LOOPS) and self.made is not None:
                self.made |= written
            self.made, self.carried = (before[0] if isinstance(node, _LOOPS) else self.made), before[1]

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace products of what may be tensors."""
        operands, name = (node.left, node.right), _OPERATORS.get(type(node.op))
        own = tuple(map(self._own, operands))
        may_be = all(name is not None or self.values.may_be(one) for name, one in zip(own, operands, strict=True))
        self.generic_visit(node)
        if name is None or not may_be or self.carried:
            return node
        return self._replaced(node, name, [node.left, node.right], [], own)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace calls of functions, and of methods of what may be tensors."""
        function, called = node.func, self._meant(node.func)
        name = self.calls.functions.get(called) if callable(called) else None
        arguments = node.args
        if name is None and isinstance(function, ast.Attribute) and self._meant(function.value) is None:
            name, arguments = self.calls.methods.get(function.attr), [function.value, *node.args]
        self.generic_visit(node)
        return node if name is None else self._replaced(node, name, arguments, node.keywords)

    def _own(self, node: ast.AST) -> str | None:
        """Return the attribute of the module that an expression is, or a view or a cast of."""
        while True:
            if isinstance(node, ast.Attribute):
                is_own = isinstance(node.value, ast.Name) and node.value.id == self.code.co_varnames[0]
                return node.attr if is_own else None
            if isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            else:
                return None

    def _replaced(self, node: ast.AST, name: str, args: list[ast.expr], named: list[ast.keyword], own=()) -> ast.AST:
        cell = f"_rmm_{''.join(one if one.isidentifier() else str(ord(one)) for one in name)}"
        self.cells[cell] = self.calls.ours[name]
        place = ast.Constant(2 * (self.first + len(self.sites)))  # of two factors
        self.sites.append(Site(name, own))
        called = ast.Name(cell, ast.Load())
        module = ast.Name(self.code.co_varnames[0], ast.Load())
        return ast.copy_location(ast.Call(called, [module, place, *args], named), node)

    def _meant(self, node: ast.AST) -> Any:
        """Return the object that a name of a module, or in one, means where the function is; None for another."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            cells = dict(zip(self.code.co_freevars, self.original.__closure__ or (), strict=True))
            if node.id in cells:
                return _contents(cells[node.id])
            return self.original.__globals__.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(inside := self._meant(node.value), ModuleType):
            return getattr(inside, node.attr, None)
        return None


@functools.lru_cache(maxsize=8)
def _file(text: str) -> tuple[ast.Module, list[str]]:
    """Return the syntax tree of a file, and the names that it imports for itself."""
    tree, found = ast.parse(text), list[str]()
    inside: list[ast.AST] = [tree]
    while inside:
        one = inside.pop()
        if isinstance(one, ast.Import | ast.ImportFrom) and getattr(one, "module", None) != "__future__":
            found += [(name.asname or name.name).partition(".")[0] for name in one.names if name.name != "*"]
        if not isinstance(one, _INNER):
            inside += ast.iter_child_nodes(one)
    return tree, list(dict.fromkeys(found))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


_NUMBERS = ("len", "int", "float", "bool", "max", "min", "round", "getattr", "range", "str", "sum")
_OF_TENSORS = ("size", "numel", "dim", "item", "tolist", "get")


class _Values:
    """Tells which expressions in a function may be tensors, by what is assigned to its names."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        args = tree.args
        defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
        pairs = [*zip(args.args, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)][1:]
        self.given = {one.arg for one, default in pairs if not _is_plain(one, default)}
        self.assigned: dict[str, list[ast.expr]] = {}
        for one in ast.walk(tree):
            if isinstance(one, ast.Assign):
                names = (name for target in one.targets for name in ast.walk(target))
                for name in names:
                    if isinstance(name, ast.Name):
                        self.assigned.setdefault(name.id, []).append(one.value)

    def may_be(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> bool:
        """Say whether an expression may be a tensor: what a call returns, an argument, and what is made of those."""
        if isinstance(node, ast.Name):
            values = [] if node.id in seen else self.assigned.get(node.id, [])
            return node.id in self.given or any(self.may_be(one, seen | {node.id}) for one in values)
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                return function.id not in _NUMBERS
            is_number = isinstance(function, ast.Attribute) and function.attr in _OF_TENSORS
            return not is_number and not ast.unparse(function).startswith("math.")
        if isinstance(node, ast.BinOp):
            return self.may_be(node.left, seen) or self.may_be(node.right, seen)
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.may_be(node.value, seen)
        if isinstance(node, ast.IfExp):
            return self.may_be(node.body, seen) or self.may_be(node.orelse, seen)
        return isinstance(node, ast.UnaryOp) and self.may_be(node.operand, seen)


def _is_plain(argument: ast.arg, default: ast.expr | None) -> bool:
    """Say whether an argument is a number or a string, by its annotation or its default."""
    names = set() if argument.annotation is None else {*re.findall(r"\w+", ast.unparse(argument.annotation))}
    is_constant = isinstance(default, ast.Constant) and default.value is not None
    return is_constant or (bool(names & {"int", "float", "bool", "str"}) and "Tensor" not in names)


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Say whether two codes have the same instructions and names."""
    fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, field) != getattr(other, field) for field in fields):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )

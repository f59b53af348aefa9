"""Hashes live Python objects with the code that they can reach: two models with one hash are captured to one graph.

It reads what is loaded, not files: a class whose forward was replaced, a file that was edited after its import and a global that
was set by hand count as what they are now.

    user's code     bytecode, constants, defaults and closures; then every global that it names, and the classes of all of these
    libraries       what an installed package defines is identified by name, version and the text of its file; what others
                    have put into its classes, modules and tables is followed as well
    data            numbers, texts, containers, and objects by class and attributes

What it cannot see through raises `NotKeyedError`: tensors that the model does not own, objects whose state is in C, code that
finds other code by a computed name.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def _both(path: str) -> tuple[str, str]:
    return path, os.path.realpath(path)


PLAIN = (bool, int, float, complex, str, bytes, range, type(None), type(...), type(NotImplemented))
TORCH_DATA = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
BY_NAME = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
VALUES = (tuple, frozenset, types.CodeType)  # whether two of them are one object says nothing: compilers merge equal ones
FINDS_CODE = frozenset({"eval", "exec", "compile", "__import__", "import_module", "globals", "locals"})
METHODS = (types.FunctionType, property, staticmethod, classmethod)
UNSEEN = frozenset({"_abc_impl"})  # of a class: caches of isinstance
IMPORT = dis.opmap["IMPORT_NAME"]

PYTHON = "python"

_STDLIB = tuple({os.path.join(path, "") for name in ("stdlib", "platstdlib") for path in _both(sysconfig.get_paths()[name])})
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_INSTALLED = ("site-packages", "dist-packages")
_OF_CODE = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code", "co_names", "co_varnames", "co_freevars",
    "co_cellvars", "co_firstlineno", "co_linetable", "co_exceptiontable", "co_qualname",
)  # fmt: skip


class NotKeyedError(Exception):
    """Says what cannot be keyed."""


class Walk:
    """`special(walk, value)` hashes a value itself, and returns True, or leaves it to the walk."""

    def __init__(self, special: Callable[[Walk, Any], bool]) -> None:
        self._hash = hashlib.sha256()
        self._special = special
        self._numbers: dict[int, int] = {}  # of objects that were met
        self._alive: list[Any] = []  # so that no other object gets their ids
        self._files: set[str] = set()  # of libraries, that are identified

    def digest(self) -> str:
        return self._hash.hexdigest()

    def say(self, *words: Any) -> None:
        self._hash.update(repr(words).encode(errors="surrogatepass") + b"\0")

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in PLAIN or kind in TORCH_DATA:
            self.say(kind.__name__, repr(value))
            return
        if kind not in VALUES:
            if id(value) in self._numbers:
                self.say("again", self._numbers[id(value)])
                return
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        if not self._special(self, value):
            self._visit(value, kind)

    def _visit(self, value: Any, kind: type) -> None:
        match value:
            case type():
                self._class(value)
            case types.FunctionType():
                self._function(value)
            case types.CodeType():
                self._code(value)
            case types.ModuleType():
                self.say("module", value.__name__)
                self._of_library(value.__name__)
            case logging.Logger():
                self.say("logger", value.name)
            case types.MethodType():
                self._parts("method", value.__func__, value.__self__)
            case functools.partial():
                self._parts("partial", value.func, value.args, value.keywords)
            case property():
                self._parts("property", value.fget, value.fset)
            case staticmethod() | classmethod():
                self._parts(kind.__name__, value.__func__)
            case functools.cached_property():
                self._parts("cached", value.func)
            case enum.Enum():
                self._parts("enum", kind, value.name)
            case slice():
                self._parts("slice", value.start, value.stop, value.step)
            case set() | frozenset():
                self._set(value)
            case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
                self.say("operator", str(value))
            case _ if isinstance(value, BY_NAME):
                self.say("built in", getattr(value, "__module__", ""), value.__qualname__)
                owner = getattr(value, "__self__", None)
                if owner is not None and not isinstance(owner, (type, types.ModuleType)):
                    self.visit(owner)
            case _ if kind.__module__ == "typing":
                self.say("typing", repr(value))
            case _ if hasattr(value, "cache_info") and hasattr(value, "__wrapped__"):
                self._parts("remembers", value.__wrapped__)
            case _:
                self._object(value, kind)

    def _parts(self, word: str, *parts: Any) -> None:
        self.say(word, len(parts))
        for part in parts:
            self.visit(part)

    def _set(self, value: Iterable[Any]) -> None:
        if any(type(each) not in PLAIN for each in value):
            raise NotKeyedError("a set of objects")
        self.say("set", sorted(map(repr, value)))

    def _object(self, value: Any, kind: type) -> None:
        """By class, items and attributes."""
        self.visit(kind)
        known = False
        if isinstance(value, (dict, types.MappingProxyType)):
            known = True
            self.say("items", len(value))
            for key, item in value.items():
                self.visit(key)
                self.visit(item)
            self.visit(getattr(value, "default_factory", None))
        elif isinstance(value, (list, tuple, deque)):
            known = True
            self._parts("items", *value)
        elif isinstance(value, PLAIN):
            known = True
            self.say(repr(value))
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
        if not known and not slots and not hasattr(value, "__dict__"):
            raise NotKeyedError(f"an object of {kind.__module__}.{kind.__qualname__}")
        self.attributes(held)

    def attributes(self, held: Mapping[str, Any]) -> None:
        for name in sorted(held):
            self.say("attribute", name)
            self.visit(held[name])

    # Code.

    def _class(self, cls: type) -> None:
        self.say("class", cls.__module__, cls.__qualname__)
        library = self._of_library(cls.__module__)
        if library is not None:
            self._strangers(library, cls.__qualname__, vars(cls))
            return
        self._parts("bases", type(cls), *cls.__mro__[1:])
        for name, value in sorted(vars(cls).items()):
            dunder = name.startswith("__") and name.endswith("__")
            if name not in UNSEEN and (not dunder or isinstance(value, METHODS)):
                self.say("in class", name)
                self.visit(value)

    def _function(self, function: types.FunctionType) -> None:
        self.say("function", function.__module__, function.__qualname__)
        for cell in function.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                inside = None
            self.visit(inside)
        file = function.__code__.co_filename
        library = _library(file)
        if library is not None:
            self._identify(library, file)
            return
        self._parts("given", function.__defaults__, function.__kwdefaults__)
        self._code(function.__code__)
        self._named(function)

    def _code(self, code: types.CodeType) -> None:
        self.say("code", Path(code.co_filename).parts[-2:], *(getattr(code, name) for name in _OF_CODE))
        for constant in code.co_consts:
            self.visit(constant)

    def _named(self, function: types.FunctionType) -> None:
        """Every global that the code names, and what it names of modules."""
        names, imports = _names(function.__code__), _imports(function.__code__)
        if found := FINDS_CODE & names:
            raise NotKeyedError(f"{function.__qualname__} calls {', '.join(sorted(found))}")
        space = function.__globals__
        modules = [module for name, level in sorted(imports) if (module := _imported(name, level, space)) is not None]
        for name in sorted(names):
            if name in space:
                self.say("global", name)
                if isinstance(space[name], types.ModuleType):
                    modules.append(space[name])
                else:
                    self.visit(space[name])
            elif getattr(builtins, name, None) is not None and type(getattr(builtins, name)) is types.FunctionType:
                self.visit(getattr(builtins, name))  # replaced by hand
        known: set[str] = set()
        for module in modules:
            self._of_module(module, names, known)

    def _of_module(self, module: types.ModuleType, names: frozenset[str], known: set[str]) -> None:
        if module.__name__ in known:
            return
        known.add(module.__name__)
        self.visit(module)
        space = vars(module)
        library = self._of_library(module.__name__)
        if library is not None:
            self._strangers(library, module.__name__, {name: space[name] for name in names if name in space})
        else:
            every = "getattr" in names or "vars" in names
            for name in sorted(space if every else names & space.keys()):
                value = space[name]
                if not isinstance(value, types.ModuleType) and (not every or name in names or callable(value)):
                    self.say("of module", module.__name__, name)
                    self.visit(value)
        for name in sorted(names & space.keys()):
            if isinstance(space[name], types.ModuleType):
                self._of_module(space[name], names, known)

    # Libraries.

    def _of_library(self, module: str) -> str | None:
        """The library that a module belongs to, which is identified here; None for the user's own."""
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        top = module.partition(".")[0]
        library = _library(file) if file else PYTHON if top in sys.stdlib_module_names else "torch" if top == "torch" else None
        if library is not None and top != "__main__":
            self._identify(library, file)
            return library
        return None

    def _identify(self, library: str, file: str) -> None:
        """A package by its version and, except for torch, the text of the file. `capture_key` has the version of Python."""
        if library == PYTHON or file in self._files:
            return
        self._files.add(file)
        if library == "torch":
            self.say("library", torch.__version__, torch.version.git_version)
            return
        try:
            text = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError as error:
            raise NotKeyedError(f"{file} cannot be read: {error}") from error
        self.say("library", library, str(getattr(sys.modules.get(library), "__version__", "")), Path(file).parts[-2:], text)
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] == library and getattr(module, "__file__", None) == file:
                self._strangers(library, name, vars(module))

    def _strangers(self, library: str, where: str, space: Mapping[str, Any]) -> None:
        """What others have put into the classes, functions and tables of a library."""
        for name, value in sorted(space.items()):
            if isinstance(value, Mapping) and not name.startswith("__"):
                found = {str(key): item for key, item in [*value.items()]}
            else:
                found = {"": value}
            for key, item in sorted(found.items()):
                if _owner(item) not in (library, "torch", PYTHON):
                    self.say("put into", where, name, key)
                    self.visit(item)


def _library(file: str) -> str | None:
    """The name of the installed package that a file belongs to; None for the user's own files."""
    if file.startswith("<frozen "):
        return PYTHON
    if file.startswith(_TORCH):
        return "torch"
    parts = Path(file).parts
    for at, part in enumerate(parts[:-1]):
        if part in _INSTALLED:
            return parts[at + 1].removesuffix(".py")
    return PYTHON if file.startswith(_STDLIB) else None


def _owner(value: Any) -> str | None:
    """The library whose code a function or class is; Python for everything else."""
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if isinstance(function, types.FunctionType):
        return _library(function.__code__.co_filename)
    if isinstance(function, type):
        file = getattr(sys.modules.get(function.__module__), "__file__", None)
        return _library(file) if file else PYTHON
    return PYTHON


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(
        f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Of globals and attributes, also in functions inside it; texts too if it gets attributes by text."""
    found = {*code.co_names}
    if "getattr" in found:
        found |= {each for each in code.co_consts if isinstance(each, str)}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _names(each)
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """Modules that it imports when it runs, and how relative their names are."""
    found: set[tuple[str, int]] = set()
    if IMPORT in code.co_code[::2]:
        before: list[Any] = []
        for each in dis.get_instructions(code):
            if each.opname == "IMPORT_NAME":
                found.add((each.argval, next((value for value in before[-2:] if isinstance(value, int)), 0)))
            before.append(each.argval)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _imports(each)
    return frozenset(found)


def _imported(name: str, level: int, space: Mapping[str, Any]) -> types.ModuleType | None:
    full = importlib.util.resolve_name("." * level + name, space.get("__package__") or "") if level else name
    if full not in sys.modules:
        if full.partition(".")[0] in sys.stdlib_module_names:
            return None
        raise NotKeyedError(f"{full} is imported only when the forward runs")
    return sys.modules[full]

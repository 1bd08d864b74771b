"""Stand-ins that let an unchanged SGLang start on a CPU without AMX, Triton and SGLang's kernels.

Python imports ``sitecustomize`` first in each process, so this folder on PYTHONPATH reaches every process of a server.
SGLang imports some GPU and media packages wherever it runs, and on a CPU calls none of them. An import of one that is not
installed gets a module made of stand-ins: they can be imported from, subclassed and used as decorators. Calling into
SGLang's kernels raises, because a result would be a lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType

ABSENT = {
    "IPython": "0.0.0",
    "jsonschema": "0.0.0",
    "sentencepiece": "0.0.0",
    "sgl_kernel": "0.4.10",
    "soundfile": "0.0.0",
    "torchvision": "0.0.0",
    "triton": "3.6.0",
}
"""Package to the version that it claims."""
KERNELS = "sgl_kernel"
ASKS = find_spec.__code__.co_filename
"""``importlib.util.find_spec``: who wants to know whether a package is there hears that it is not."""
ASKS_BY_IMPORT = "/torch/utils/_triton.py"
"""Imports Triton to learn whether it is there; has to hear that it is not."""


class _Kind(type):
    """Class of stand-in classes: whatever is asked of one is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(ModuleType):
    """A module, function or object of an absent package."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = ABSENT.get(name, "0.0.0")

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made: object
        if self.__name__ == KERNELS and (replaced := getattr(_kernels(), name, None)) is not None:
            return replaced
        if name[0].isupper():
            made = _Kind(name, (), {"__module__": self.__name__, "__init__": lambda *_given, **_named: None})
        else:
            made = sys.modules.get(full) or StandIn(full)
        setattr(self, name, made)
        return made

    def __call__(self, *given: object, **named: object) -> object:
        """Decorate, or raise for the kernels."""
        if self.__name__.partition(".")[0] == KERNELS:
            raise NotImplementedError(f"{self.__name__} was called, and this CPU server has no kernels")
        if len(given) == 1 and callable(given[0]) and not named:
            return given[0]  # @decorator
        return lambda function=None, *_given, **_named: function  # @decorator(...)

    def __getitem__(self, _key: object) -> StandIn:
        return self

    def __contains__(self, _item: object) -> bool:
        return False

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __or__(self, _other: object) -> StandIn:
        return self

    __ror__ = __or__


def _kernels() -> ModuleType:
    """Those kernels that torch can stand in for, exactly; asked for late because it imports torch."""
    import eyas_cpu_kernels  # pyright: ignore[reportMissingImports] - beside this file, on the server's PYTHONPATH

    return eyas_cpu_kernels


class Finder:
    """Last of ``sys.meta_path``: a package that is installed stays what it is."""

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """A stand-in for who imports; nothing for who asks whether the package is there."""
        if name.partition(".")[0] not in ABSENT or _only_asks(sys._getframe(1)):
            return None
        return ModuleSpec(name, self, is_package=True)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> StandIn:
        """The module of a spec."""
        return StandIn(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        """Nothing to run."""


def _only_asks(frame: FrameType | None) -> bool:
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename == ASKS:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(ASKS_BY_IMPORT)


sys.meta_path.append(Finder())  # pyright: ignore[reportArgumentType]

"""Import stubs so that sglang 0.5.23 imports on a CPU-only box (testing only)."""

import importlib.abc
import importlib.machinery
import os
import sys
import types

STUBS = set(filter(None, os.environ.get("SGL_STUBS", "torchvision,torchaudio,triton,sgl_kernel,soundfile").split(",")))


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _cls(cls.__module__, name)

    def __instancecheck__(cls, o):
        return False


def _cls(mod, name):
    return _Meta(
        name,
        (),
        {
            "__module__": mod,
            "__init__": lambda self, *a, **k: None,
            "__call__": lambda self, *a, **k: None,
            "__getitem__": lambda self, k: self,
        },
    )


class _Fn:
    """Callable usable as a decorator, plain or parameterised, and as an attribute bag."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *a, **k):
        if len(a) == 1 and not k and callable(a[0]):
            return a[0]
        return lambda fn=None, *aa, **kk: fn

    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return _Fn(n)


class _Mod(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            if name == "__version__":
                return "0.0.0+stub"
            raise AttributeError(name)
        full = self.__name__ + "." + name
        if full in sys.modules:
            return sys.modules[full]
        v = _cls(self.__name__, name) if name[0].isupper() else _Fn(name)
        setattr(self, name, v)
        return v


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Mod(spec.name)

    def exec_module(self, m):
        if m.__name__ == "triton":
            m.__version__ = "3.0.0"
            m.cdiv = lambda a, b: -(a // -b)
            m.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1

            class Config:
                def __init__(self, kwargs=None, num_warps=4, num_stages=2, **e):
                    self.kwargs = kwargs or {}

            m.Config = Config


sys.meta_path.append(_Finder())  # after the real finders: a really installed package wins

"""Which optional packages a program needs, said in one line instead of an import error's traceback.

The base install is msgspec alone; programs beside ``hicachectl`` come with an extra of the distribution.
"""

from collections.abc import Sequence
from importlib.util import find_spec

SIDECAR = ("trio", "zmq", "hypercorn", "starlette", "prometheus_client")
ENGINE = ("torch", "numpy", "zmq", "xxhash", "starlette", "uvicorn")


def missing(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` (import names) that are not installed here; imports none of them."""
    return [name for name in modules if find_spec(name) is None]


def advice(absent: Sequence[str], *extras: str) -> str:
    """What to tell the user: the absent modules and the command that installs them."""
    return f"needs {', '.join(absent)}: pip install 'hicache-sidecar[{','.join(extras)}]'"

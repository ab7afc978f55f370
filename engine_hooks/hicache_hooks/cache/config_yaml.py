"""YAML for the extra config: the JSON subset of YAML 1.2, on PyYAML's safe loader.

Plain scalars follow JSON's schema (``yes`` and ``1:30`` are strings, not a boolean and ninety); tags, anchors
with aliases (a few lines can expand to gigabytes), merge keys and several documents are refused.
"""

import re
from typing import Any, NoReturn

import yaml

from hicache_hooks.cache.config_text import bad, safe_name

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_RESOLVERS = (
    (_NULL, re.compile(r"(?:null|Null|NULL|~|)$"), ("n", "N", "~", "")),
    (_BOOL, re.compile(r"(?:true|false)$"), ("t", "f")),
    (_INT, re.compile(r"-?(?:0|[1-9][0-9]*)$"), tuple("-0123456789")),
    (
        _FLOAT,
        re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|-?\.inf|\.nan)$"),
        tuple("-.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            _refuse("an alias", event.start_mark)
        if getattr(event, "tag", None) is not None:
            _refuse("a tag", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                _refuse("a key that is not a string", key.start_mark)
            if key.value in seen:
                raise bad(f"duplicate key {safe_name(key.value)}{_at(key.start_mark)}", "duplicate_key")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))


def load(text: str) -> Any:
    """The document's value.

    Raises:
        InvalidConfig: syntax, or something outside the subset; with line and column, without content.
    """
    failed = ""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as exc:
        failed = f"not valid YAML{_at(exc.problem_mark)}"
    except (yaml.YAMLError, ValueError):
        failed = "not valid YAML"
    finally:
        if loader is not None:
            loader.dispose()
    raise bad(failed, "syntax")


def _at(mark: Any) -> str:
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _refuse(what: str, mark: Any) -> NoReturn:
    raise bad(f"{what} is not allowed in the extra config{_at(mark)}", "syntax")

"""Reading a YAML document strictly: what is not known is refused, with file, line and a way out.

A misspelled key that is skipped would be a test that cannot fail. So every mapping is read through a table of the keys
it may have, every value through a `Kind` that says in its error what it wants, and every refusal is one line that
starts with `file:line:`. Knows nothing of scenarios.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Document", "Kind", "Parameter", "ScenarioError", "unknown"]


class ScenarioError(Exception):
    """A document that cannot be understood; the text is one line with file, line and the way out."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: its name in the reference, what it looks like, and how it is read (raises ValueError)."""

    name: str
    looks: str
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A key of a mapping. ``needed``: there is no default."""

    name: str
    kind: Kind
    text: str
    needed: bool = False
    default: Any = None


def unknown(what: str, given: object, allowed: Iterable[str]) -> str:
    """``unknown event 'silnt'; did you mean 'silent'?``"""
    close = difflib.get_close_matches(str(given), list(allowed), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(allowed)}"
    return f"unknown {what} {str(given)!r}{hint}"


class _Lines(yaml.SafeLoader):
    """Remembers the line of each mapping and of each of its keys, and refuses a key that stands twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.line_of: dict[int, int] = {}
        self.line_of_key: dict[tuple[int, Any], int] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"{key!r} stands twice", problem_mark=key_node.start_mark)
            keys[key] = key_node.start_mark.line + 1
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        self.line_of[id(mapping)] = node.start_mark.line + 1
        self.line_of_key.update({(id(mapping), key): line for key, line in keys.items()})
        return mapping

    def construct_yaml_map(self, node: Any) -> Any:
        yield self.construct_mapping(node, deep=True)


_Lines.add_constructor("tag:yaml.org,2002:map", _Lines.construct_yaml_map)


@dataclass(slots=True)
class Document:
    """A document and where its mappings stand. ``of`` reads a file, or takes the contents as they are."""

    root: Any
    file: str = "scenario"
    _line_of: dict[int, int] = field(default_factory=dict)
    _line_of_key: dict[tuple[int, Any], int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str | Path | Mapping[str, Any]) -> Document:
        if isinstance(source, Mapping):
            return cls(source)
        path = Path(source)
        try:
            content = path.read_bytes()
            loader = _Lines(content.decode("utf-8-sig"))
            return cls(loader.get_single_data(), str(source), loader.line_of, loader.line_of_key)
        except OSError as error:
            raise ScenarioError(f"{path}: {error.strerror or error}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ScenarioError(f"{path}:{line}: {error.problem}") from error
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ScenarioError(
                f"{path}:{line}: this is no text in UTF-8, as YAML is; is it the right file?"
            ) from error
        except yaml.reader.ReaderError as error:
            line = content.decode("utf-8-sig").count("\n", 0, error.position) + 1
            raise ScenarioError(f"{path}:{line}: a character that YAML does not have; is it the right file?") from error
        except yaml.YAMLError as error:
            raise ScenarioError(f"{path}: {' '.join(str(error).split())}") from error
        except RecursionError:
            raise ScenarioError(f"{path}: it is nested too deeply; is it the right file?") from None

    def wrong(self, where: Any, text: str, key: Any = None) -> ScenarioError:
        """The refusal of what stands at ``where``, a mapping of this document, or of one of its keys."""
        line = self.line(where, key)
        return ScenarioError(f"{self.file}{f':{line}' if line else ''}: {text}")

    def line(self, where: Any, key: Any = None) -> int | None:
        """Where a mapping of this document stands, or one of its keys; None for what was not read from a file."""
        return self._line_of_key.get((id(where), key), self._line_of.get(id(where)))

    def mapping(self, value: Any, what: str, at: Any = None) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(at, f"{what} must be a mapping, not {'empty' if value is None else repr(value)}")
        return value

    def rows(self, root: Mapping[str, Any], key: str) -> Iterable[Any]:
        rows = root.get(key)
        if rows is None:  # the key alone
            return ()
        if not isinstance(rows, list | tuple):
            raise self.wrong(root, f"{key} must be a list, not {rows!r}", key)
        return rows

    def known(self, given: Mapping[str, Any], allowed: Iterable[str], what: str, at: Any = None) -> None:
        for key in given:
            if key not in allowed:
                raise self.wrong(self._place(given, at), unknown(what, key, allowed), key)

    def read(
        self, given: Mapping[str, Any], parameters: Iterable[Parameter], what: str, at: Any = None
    ) -> dict[str, Any]:
        """The values of a mapping that has these keys and no others; a key that is not given has its default."""
        table = {parameter.name: parameter for parameter in parameters}
        self.known(given, table, f"part of {what}", at)
        values: dict[str, Any] = {}
        for name, parameter in table.items():
            if name in given:
                values[name] = self.value(given, name, parameter.kind, at)
            elif parameter.needed:
                raise self.wrong(self._place(given, at), f"{what} needs {name}")
            else:
                values[name] = parameter.default
        return values

    def value(self, given: Mapping[str, Any], name: str, kind: Kind, at: Any = None) -> Any:
        try:
            return kind.read(given[name])
        except ValueError as error:
            raise self.wrong(self._place(given, at), f"{name}: {error}", name) from error

    def _place(self, given: Any, at: Any) -> Any:
        return given if id(given) in self._line_of else at

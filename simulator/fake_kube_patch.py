"""The patches an API server understands, as pure functions of (current object, patch) -> new object.

Strategic merge is the one clients of Kubernetes use without knowing it: lists of a pod status merge by a key that the
schema names, so a condition somebody else wrote survives ours; a merge patch would replace the whole list. Which list
does what comes from ``simulator.fake_kube_schema`` alone.

Nothing here changes its arguments; parts of them may be shared with the result. Called by
``simulator.fake_kube_store`` only.
"""

from __future__ import annotations

from typing import Any

from simulator.fake_kube_schema import Field, fields_of

__all__ = ["PatchError", "json_patch", "merge_patch", "strategic_merge"]

Object = dict[str, Any]

_DELETE_FROM_LIST = "$deleteFromPrimitiveList/"
_ELEMENT_ORDER = "$setElementOrder/"


class PatchError(Exception):
    """A patch that cannot be applied: malformed (``malformed`` true, HTTP 400) or not fitting the object (422)."""

    def __init__(self, message: str, *, malformed: bool = False) -> None:
        super().__init__(message)
        self.malformed = malformed


# Strategic merge -----------------------------------------------------------------------------------------------------


def strategic_merge(type_name: str, current: Object, patch: Any) -> Object:
    """Apply a strategic merge patch to an object of ``type_name`` (a kind, or a type of the schema).

    Understands null, ``$patch`` (replace, delete, merge), ``$retainKeys`` and ``$deleteFromPrimitiveList``;
    ``$setElementOrder`` is accepted and ignored.
    """
    if not isinstance(patch, dict):
        raise PatchError("a strategic merge patch is a JSON object", malformed=True)
    directive = patch.get("$patch", "merge")
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    if directive != "merge":
        raise PatchError(f"Unknown patch type: {directive}", malformed=True)
    result = _retained(current, patch)
    for key, value in patch.items():
        if key.startswith(_DELETE_FROM_LIST):
            _delete_from_list(result, key.removeprefix(_DELETE_FROM_LIST), value)
        elif not key.startswith("$"):
            _merge_field(result, key, value, fields_of(type_name).get(key))
    return result


def _retained(current: Object, patch: Object) -> Object:
    if "$retainKeys" not in patch:
        return dict(current)
    keep = patch["$retainKeys"]
    if not isinstance(keep, list):
        raise PatchError("$retainKeys is a list of keys", malformed=True)
    return {key: value for key, value in current.items() if key in keep}


def _delete_from_list(result: Object, key: str, values: Any) -> None:
    if not isinstance(values, list):
        raise PatchError(f"{_DELETE_FROM_LIST}{key} is a list", malformed=True)
    if key in result:
        result[key] = [item for item in result[key] if item not in values]


def _merge_field(result: Object, key: str, value: Any, field: Field | None) -> None:
    if value is None:
        result.pop(key, None)
    elif isinstance(value, dict):
        current = result.get(key)
        type_name = field.type if field else "any"
        result[key] = strategic_merge(type_name, current if isinstance(current, dict) else {}, value)
    elif isinstance(value, list) and field and field.merge_key:
        current = result.get(key)
        result[key] = _merge_list(current if isinstance(current, list) else [], value, field, key)
    else:
        result[key] = value


def _merge_list(current: list[Any], patch: list[Any], field: Field, name: str) -> list[Any]:
    if field.merge_key == "*":
        return [*current, *(item for item in dict.fromkeys(patch) if item not in current)]
    directives = [item.get("$patch") if isinstance(item, dict) else None for item in patch]
    if "replace" in directives:
        return [item for item, directive in zip(patch, directives, strict=True) if directive is None]
    untouched, order = list(current), [old.get(field.merge_key) for old in current]
    patched: dict[Any, Any] = {}
    for item, directive in zip(patch, directives, strict=True):
        identity = _identity(item, field, name)
        old = patched.pop(identity, None)
        if old is None:
            old = next((each for each in untouched if each.get(field.merge_key) == identity), {})
            untouched = [each for each in untouched if each is not old]
        if directive == "delete":
            untouched = [each for each in untouched if each.get(field.merge_key) != identity]
        else:
            patched[identity] = strategic_merge(field.type, old, item)
    return _in_order(untouched, list(patched.values()), field.merge_key, order)


def _in_order(untouched: list[Any], patched: list[Any], merge_key: str, order: list[Any]) -> list[Any]:
    """Both merged as the original does it: what is new comes before what it cannot be compared with."""
    result: list[Any] = []
    while untouched and patched:
        left, right = untouched[0].get(merge_key), patched[0].get(merge_key)
        first = right in order and order.index(left) < order.index(right)
        result.append((untouched if first else patched).pop(0))
    return [*result, *untouched, *patched]


def _identity(item: Any, field: Field, name: str) -> Any:
    if not isinstance(item, dict) or item.get(field.merge_key) is None:
        raise PatchError(f"map: {item} does not contain declared merge key: {field.merge_key} (list {name})")
    return item[field.merge_key]


# Merge patch, RFC 7386 -----------------------------------------------------------------------------------------------


def merge_patch(current: Any, patch: Any) -> Any:
    """RFC 7386: objects merge, null removes, everything else (lists too) replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(current) if isinstance(current, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


# JSON patch, RFC 6902 ------------------------------------------------------------------------------------------------


def json_patch(current: Any, operations: Any) -> Any:
    """RFC 6902: all operations or none; a failed ``test`` or a path that does not exist is a ``PatchError``."""
    if not isinstance(operations, list):
        raise PatchError("a JSON patch is a list of operations", malformed=True)
    document = _copy(current)
    for operation in operations:
        document = _apply(document, operation)
    return document


def _apply(document: Any, operation: Any) -> Any:
    if not isinstance(operation, dict) or "op" not in operation or "path" not in operation:
        raise PatchError("an operation has op and path", malformed=True)
    op, path = operation["op"], _pointer(operation["path"])
    if op == "add":
        return _add(document, path, _member(operation, "value"))
    if op == "remove":
        return _remove(document, path)
    if op == "replace":
        return _add(_remove(document, path) if path else document, path, _member(operation, "value"))
    if op == "test":
        if not _equal(_find(document, path), _member(operation, "value")):
            raise PatchError(f"testing value {operation['path']} failed: test failed")
        return document
    if op in ("move", "copy"):
        source = _pointer(_member(operation, "from"))
        value = _copy(_find(document, source))
        if op == "move" and path[: len(source)] == source and path != source:
            raise PatchError("a value cannot move into itself")
        return _add(_remove(document, source) if op == "move" else document, path, value)
    raise PatchError(f"Unexpected kind: {op}", malformed=True)


def _member(operation: Object, name: str) -> Any:
    if name not in operation:
        raise PatchError(f"operation {operation['op']} needs {name}", malformed=True)
    return operation[name]


def _pointer(text: Any) -> list[str]:
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise PatchError(f"not a JSON pointer: {text!r}", malformed=True)
    return [token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:]]


def _find(document: Any, path: list[str]) -> Any:
    for token in path:
        if isinstance(document, dict) and token in document:
            document = document[token]
        elif isinstance(document, list):
            document = document[_index(token, len(document) - 1)]
        else:
            raise PatchError(f"path does not exist: missing {token!r}")
    return document


def _index(token: str, last: int) -> int:
    if not token.isascii() or not token.isdigit() or (len(token) > 1 and token[0] == "0") or int(token) > last:
        raise PatchError(f"index {token!r} is out of bounds or none")
    return int(token)


def _add(document: Any, path: list[str], value: Any) -> Any:
    value = _copy(value)
    if not path:
        return value
    parent = _find(document, path[:-1])
    if isinstance(parent, dict):
        parent[path[-1]] = value
    elif isinstance(parent, list):
        parent.insert(len(parent) if path[-1] == "-" else _index(path[-1], len(parent)), value)
    else:
        raise PatchError(f"path does not exist: {path[-1]!r} has no parent")
    return document


def _remove(document: Any, path: list[str]) -> Any:
    if not path:
        raise PatchError("the whole document cannot be removed")
    _find(document, path)
    parent = _find(document, path[:-1])
    if isinstance(parent, dict):
        del parent[path[-1]]
    else:
        del parent[int(path[-1])]
    return document


def _equal(left: Any, right: Any) -> bool:
    # True == 1 in Python, not in JSON.
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value

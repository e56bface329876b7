"""Turns a reply of the program into another one of the same form: what changes with it in the tests depends on the program.

Works on the messages of values.py: each number, text and truth becomes another one, and each new container gets an item more.
"""

import base64
import datetime
from array import array
from contextlib import suppress
from typing import Any

from megatron_rl.graders.sandbox.values import PLAIN_ROWS

OTHER_ITEM = 7
"""An item where there was none. Numbers change by it: odd, and small, so that the program's functions can do with the sum."""


def other_reply(reply: dict[str, Any], sent: list[Any]) -> dict[str, Any]:
    """A reply with other values, and with printed text.

    Args:
        sent: Nodes of the request, of which the program has changed those that are not null in the reply.
    """
    reply = reply | {"printed": [*map(_other, reply.get("printed", ["", ""]))]}
    if "raise" in reply:
        name, bases, text = reply["raise"]
        reply["raise"] = [name, bases, _other(text)]
    if "values" in reply:
        names = reply["values"][1][0] if reply.keys() & {"callback", "raise"} else None  # number of a dict by keywords or attributes
        nodes = [sent[number] if node is None else node for number, node in enumerate(reply["nodes"])]
        reply["nodes"] = [_other_node(node, number == names, number < len(sent)) for number, node in enumerate(nodes)]
        reply["values"] = [*map(_other, reply["values"])]
    return reply


def _other(item: Any) -> Any:
    """Another value, of the same type if that can be; what stays with the program and references to containers remain."""
    match item:
        case None | bool():
            return OTHER_ITEM if item is None else not item
        case int() | float():
            return item + (OTHER_ITEM if item >= 0 else -OTHER_ITEM)
        case str():
            return f"~{item.swapcase()}~"
        case ["tuple" | "frozenset" | "named" | "dict_keys" | "dict_values" | "dict_items" as tag, parts, *rest]:
            return [tag, [*map(_other, parts)], *rest]
        case ["object", number, plain]:
            return ["object", number, _other(plain)]
        case ["scalar", *_]:
            return _other_array(item)
        case [str() as tag, data] if tag in PLAIN_ROWS:
            _, to_json, from_json = PLAIN_ROWS[tag]
            for more in (OTHER_ITEM, b"~", datetime.timedelta(OTHER_ITEM)):
                with suppress(TypeError):
                    return [tag, to_json(from_json(data) + more)]
            return [tag, f"{data}/other"] if tag in ("path", "file") else str(data)
        case ["member" | "type", *names]:
            return str(names)
    return item


def _other_node(node: list[Any], keeps_keys: bool, keeps_shape: bool) -> list[Any]:
    match node:
        case ["list" | "set" | "deque" as tag, parts, *rest]:
            parts = [*map(_other, parts)]
            return [tag, [*parts, _other(parts[-1]) if parts else OTHER_ITEM], *rest]
        case ["dict" | "OrderedDict" | "Counter" | "defaultdict" as tag, pairs, *rest]:
            pairs = [[key if keeps_keys else _other(key), _other(part)] for key, part in pairs]
            more = [_other(pairs[-1][0]), pairs[-1][1]] if pairs else [OTHER_ITEM, OTHER_ITEM]
            return [tag, pairs if keeps_keys else [*pairs, more], *rest]
        case ["record" | "namespace", *_, attributes]:
            return [*node[:-1], [[name, part if part is None else _other(part)] for name, part in attributes]]
        case ["bytearray", data]:
            return ["bytearray", f"7e{data}"]
        case ["typed", data, code]:
            values = array(code, bytes.fromhex(data))
            return ["typed", (values + values[:1]).tobytes().hex(), code]
        case ["array", *_]:
            return _other_array(node, keeps_shape)
    return node


def _other_array(data: list[Any], keeps_shape: bool = True) -> list[Any]:
    """Other numbers, and of an array one row more unless it ``keeps_shape``; text remains."""
    import numpy

    tag, dtype, shape, text = data
    values = numpy.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    if values.dtype.kind not in "biufc":
        return data
    values = ~values if values.dtype.kind == "b" else (values + OTHER_ITEM).astype(dtype)
    values = values if keeps_shape or not shape else numpy.concatenate([values, values[:1]])
    return [tag, dtype, list(values.shape), base64.b64encode(values.tobytes()).decode()]

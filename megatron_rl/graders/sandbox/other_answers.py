"""Turns a reply of the program into another one of the same form: what changes with it in the tests depends on the program.

Works on the messages of values.py: each number, text and truth becomes another one, and each new container gets an item more.
"""

import base64
import datetime
from array import array
from contextlib import suppress
from typing import Any

from megatron_rl.graders.sandbox.values import PLAIN_ROWS


def other_reply(reply: dict[str, Any], sent: list[Any], plus: int) -> dict[str, Any]:
    """A reply with other values, and with printed text.

    Args:
        sent: Nodes of the request, of which the program has changed those that are not null in the reply.
        plus: What numbers change by, and an item where there was none. It is not known to the program, and small, so that its functions
            can do with the sum.
    """
    reply = reply | {"printed": [_other(text, plus) for text in reply.get("printed", ["", ""])]}
    if "raise" in reply:
        name, bases, text = reply["raise"]
        reply["raise"] = [name, bases, _other(text, plus)]
    if "values" in reply:
        names = reply["values"][1][0] if reply.keys() & {"callback", "raise"} else None  # number of a dict by keywords or attributes
        nodes = [sent[number] if node is None else node for number, node in enumerate(reply["nodes"])]
        reply["nodes"] = [_other_node(node, plus, number == names, number < len(sent)) for number, node in enumerate(nodes)]
        reply["values"] = [_other(value, plus) for value in reply["values"]]
    return reply


def _other(item: Any, plus: int) -> Any:
    """Another value, of the same type if that can be; what stays with the program and references to containers remain."""
    match item:
        case None | bool():
            return plus if item is None else not item
        case int() | float():
            changed = item + (plus if item >= 0 else -plus)
            return changed if abs(changed - item) > 1 else 0.0  # not finite, or too large to change by so little
        case str():
            return f"{plus}~{item.swapcase()}~{plus}"
        case ["tuple" | "frozenset" | "named" | "dict_keys" | "dict_values" | "dict_items" as tag, parts, *rest]:
            return [tag, [_other(part, plus) for part in parts] or [plus], *rest]
        case ["object", number, plain]:
            return ["object", number, _other(plain, plus)]
        case ["scalar", *_]:
            return _other_array(item, plus)
        case [str() as tag, data] if tag in PLAIN_ROWS:
            _, to_json, from_json = PLAIN_ROWS[tag]
            for more in (plus, b"~", datetime.timedelta(plus)):
                with suppress(TypeError):
                    return [tag, to_json(from_json(data) + more)]
            return [tag, f"{data}/other"] if tag in ("path", "file") else str(data)
        case ["member" | "type", *names]:
            return str(names)
    return item


def _other_node(node: list[Any], plus: int, keeps_keys: bool, keeps_shape: bool) -> list[Any]:
    match node:
        case ["list" | "set" | "deque" as tag, parts, *rest]:
            parts = [_other(part, plus) for part in parts]
            return [tag, [*parts, _other(parts[-1], plus) if parts else plus], *rest]
        case ["dict" | "OrderedDict" | "Counter" | "defaultdict" as tag, pairs, *rest]:
            pairs = [[key if keeps_keys else _other(key, plus), _other(part, plus)] for key, part in pairs]
            more = [_other(pairs[-1][0], plus), pairs[-1][1]] if pairs else [plus, plus]
            return [tag, pairs if keeps_keys else [*pairs, more], *rest]
        case ["record" | "namespace", *_, attributes]:
            return [*node[:-1], [[name, part if part is None else _other(part, plus)] for name, part in attributes]]
        case ["bytearray", data]:
            return ["bytearray", f"7e{data}"]
        case ["typed", data, code]:
            values = array(code, bytes.fromhex(data))
            return ["typed", (values + values[:1]).tobytes().hex(), code]
        case ["array", *_]:
            return _other_array(node, plus, keeps_shape)
    return node


def _other_array(data: list[Any], plus: int, keeps_shape: bool = True) -> list[Any]:
    """Other numbers, and of an array one row more unless it ``keeps_shape``; text remains."""
    import numpy

    tag, dtype, shape, text = data
    values = numpy.frombuffer(base64.b64decode(text), dtype).reshape(shape)
    if values.dtype.kind not in "biufc":
        return data if keeps_shape else ["list", [plus]]
    values = ~values if values.dtype.kind == "b" else (values + plus).astype(dtype)
    values = values if keeps_shape or not shape else numpy.concatenate([values, values[:1]])
    return [tag, dtype, list(values.shape), base64.b64encode(values.tobytes()).decode()]

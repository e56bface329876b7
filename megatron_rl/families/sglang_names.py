"""Which of SGLang's parameters holds a checkpoint's tensor: it joins q/k/v, gate/up and the experts of a layer."""

import re
from collections.abc import Collection

from megatron_rl.families.family import SGLangSupport, families

_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight$")


def joined_name(name: str, server_names: Collection[str]) -> tuple[str, int] | None:
    """The server parameter that holds the Hugging Face tensor ``name``, and the place of this part in it.

    The names that the server has tell which family's way of joining is its own; None where none fits.
    """
    if name in server_names:
        return name, 0
    for family in families().values():
        joined, place = _joined(name, family.served)
        if joined in server_names:
            return joined, place
    return None


def _joined(name: str, served: SGLangSupport) -> tuple[str, int]:
    expert = _EXPERT.match(name)
    if expert and expert["projection"] in served.expert_parts:
        parameter, place, parts_per_expert = served.expert_parts[expert["projection"]]
        return f"{expert['prefix']}.{parameter}", int(expert["expert"]) * parts_per_expert + place
    modules = name.split(".")
    for i, module in enumerate(modules):
        if module in served.joined:
            parameter, place = served.joined[module]
            return ".".join([*modules[:i], parameter, *modules[i + 1 :]]), place
    return name, 0

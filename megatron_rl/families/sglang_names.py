"""Maps a checkpoint's tensors to SGLang's parameters, which join q/k/v, gate/up and the experts of a layer."""

import re
from collections.abc import Collection

from megatron_rl.families.family import SGLangSupport, families

_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight$")


def joined_name(name: str, server_names: Collection[str]) -> tuple[str, int] | None:
    """The server parameter that contains the Hugging Face tensor ``name``, and the tensor's index in it.

    The family is inferred from the names that the server has. Returns None if no family's joined name is among them.
    """
    if name in server_names:
        return name, 0
    for family in families().values():
        joined, index = _joined(name, family.served)
        if joined in server_names:
            return joined, index
    return None


def _joined(name: str, served: SGLangSupport) -> tuple[str, int]:
    expert = _EXPERT.match(name)
    if expert and expert["projection"] in served.expert_parts:
        parameter, index, parts_per_expert = served.expert_parts[expert["projection"]]
        return f"{expert['prefix']}.{parameter}", int(expert["expert"]) * parts_per_expert + index
    modules = name.split(".")
    for i, module in enumerate(modules):
        if module in served.joined:
            parameter, index = served.joined[module]
            return ".".join([*modules[:i], parameter, *modules[i + 1 :]]), index
    return name, 0

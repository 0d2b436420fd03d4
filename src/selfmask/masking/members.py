"""Names of tensors as names of a module's members, and back."""

from __future__ import annotations

from torch import nn


def member_key(name: str) -> str:
    """A name for a member of a module: without dots, and not that of a method ("keys")."""
    key = name.replace("%", "%25").replace("/", "%2F").replace(".", "/")
    return f"/{key}" if hasattr(nn.ParameterDict, key) else key


def tensor_name(key: str) -> str:
    return key.removeprefix("/").replace("/", ".").replace("%2F", "/").replace("%25", "%")

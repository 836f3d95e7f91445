"""Nothing of it is typed: reading all of its models takes a type checker half a minute."""

from typing import Any

def __getattr__(name: str) -> Any: ...

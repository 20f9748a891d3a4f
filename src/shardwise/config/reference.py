"""The reference of all keys of a config: Markdown for docs/config.md and the terminal, and data for machines."""

from __future__ import annotations

import inspect
import re
from dataclasses import Field, dataclass, fields
from typing import Any

from shardwise.core.errors import ConfigError, did_you_mean

from .sections import SECTIONS
from .toml import inline

HEAD = """# The keys of a config

A config is TOML. Every key can be left out; `shardwise train my.toml section.key=value` overrides it, and the run
folder's `config.toml` has the final values of all. A key that does not apply to the chosen kind of model, data or
optimizer is refused rather than ignored.

`shardwise config --reference` writes this page. `shardwise config section.key` shows one key of it, and so does
`shardwise train --help section.key`. `shardwise config my.toml` shows the values of a config with all defaults.
"""
_TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Mapping": "table",
    "tuple": "list of texts",
    "Literal": "text",
}


@dataclass(frozen=True)
class Key:
    """What the reference says of a key, in Markdown."""

    name: str  # section.key
    type: str
    does: str
    default: str
    legal: str

    def text(self) -> str:
        """Return a few lines for a terminal."""
        lines = [
            self.name,
            f"  {self.does}",
            f"  type:    {self.type}",
            f"  default: {self.default}",
            f"  legal:   {self.legal}",
        ]
        return "\n".join(lines).replace("`", "")


def reference() -> dict[str, list[Key]]:
    """Return what there is to say of each key, by section."""
    return {name: [_key(name, field) for field in fields(section)] for name, section in SECTIONS.items()}


def find(name: str) -> list[Key]:
    """Return the key ``section.key``, or all keys of a section; :class:`ConfigError` if there is neither."""
    everything = reference()
    if name in everything:
        return everything[name]
    known = [key for keys in everything.values() for key in keys]
    found = [key for key in known if name in (key.name, key.name.partition(".")[2])]
    if not found:
        names = [*everything, *(key.name for key in known), *(key.name.partition(".")[2] for key in known)]
        raise ConfigError(f"{name}: no key and no section of a config; legal: section.key.{did_you_mean(name, names)}")
    return found


def page() -> str:
    """Return docs/config.md."""
    parts = [HEAD]
    for section, keys in reference().items():
        parts.append(f"## `[{section}]`\n\n{_intro(section)}\n")
        rows = ["| key | type | meaning | default | legal |", "|---|---|---|---|---|"]
        for key in keys:
            cells = (f"`{key.name.partition('.')[2]}`", key.type, key.does, key.default, key.legal)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _intro(section: str) -> str:
    text = " ".join((inspect.getdoc(SECTIONS[section]) or "").partition(": ")[2].split())
    linked = re.sub(r"docs/([a-z]+\.md)", r"[\1](\1)", text.replace("``", "`"))
    return linked[:1].upper() + linked[1:]


def _key(section: str, field: Field[Any]) -> Key:
    words = field.metadata
    default = words["otherwise"] if field.default is None else f"`{inline(field.default)}`"
    legal = words["legal"] or _legal(words["rule"].legal)
    return Key(f"{section}.{field.name}", _type(str(field.type)), words["does"], default, legal)


def _legal(words: str) -> str:
    """Return a rule's words beside the type of its key, with what is to be typed marked."""
    number = re.sub(r"^an? (integer|number) (of at least )?", "", words)
    shorter = re.sub(r"^(-?\d+)$", r"\1 or more", number).replace(" and below ", " to below ")
    return re.sub(r'("[\w.-]+")', r"`\1`", f"from {shorter}" if " to below " in shorter else shorter)


def _type(annotation: str) -> str:
    """Return the words for the type of a key with this annotation."""
    if annotation.startswith("tuple["):
        each = {"Mapping": "tables", "int": "integers", "float": "numbers"}
        return f"list of {each.get(re.split('[^a-zA-Z]', annotation)[1], 'texts')}"
    outer = re.sub(r"\[.*?\]", "", annotation)
    found = [word for name, word in _TYPES.items() if re.search(rf"\b{name}\b", outer)]
    return " or ".join(found) or "text"

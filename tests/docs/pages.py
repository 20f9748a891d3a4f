"""The fenced blocks of a Markdown page, and what comments before them say of how they are tested.

An HTML comment right before a block (only other such comments between them) is one of

``<!-- not run: REASON -->``
    the block is not run;
``<!-- file: NAME -->``
    it is the content of a file, which later commands of the page use;
``<!-- tested with: ARGUMENT... -->``
    each command of the block gets these arguments too, such as a smaller number of steps;
``<!-- setup: ... -->``
    code in the block's language (commands for TOML) that runs before it, which readers do not need to see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DIRECTIVES = ("not run", "file", "tested with", "setup")
FENCE = re.compile(r"^( *)(```+)(\S*)\s*$")
COMMENT = re.compile(rf"<!--\s*({'|'.join(DIRECTIVES)}):\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without the indentation of the fence, and the page's line it begins on."""

    page: Path
    line: int
    language: str
    text: str
    directives: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> str | None:
        """Why it is not run, or None."""
        return self.directives.get("not run")

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in order; its text is given where it is not that of the file."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    before, at = 0, 0  # the line behind the last block
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        indent, ticks, language = opened.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks)
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        found.append(Block(page, at + 1, language, body, directives("\n".join(lines[before:at]))))
        before = at = end + 1
    return found


def directives(text: str) -> dict[str, str]:
    """Return what the comments at the very end of ``text`` say."""
    found: dict[str, str] = {}
    while True:
        comments = list(COMMENT.finditer(text))
        if not comments or text[comments[-1].end() :].strip():
            return found
        last = comments[-1]
        assert last[1] not in found, f"two comments {last[1]!r} before one block"
        found[last[1]] = last[2]
        text = text[: last.start()]


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, each on one line; comments are left out."""
    joined = text.replace("\\\n", " ")
    bare = (re.sub(r"(^|\s)#\s.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in bare if line]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and pictures that are files of the repository or anchors."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]

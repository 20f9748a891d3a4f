"""One page of HTML tells of a run all that its folder has: one file that needs no network, and no script to be read.

Everything that comes from users is escaped: the template escapes what it is given, and the pictures escape their words.
"""

from __future__ import annotations

import re
from importlib.resources import files as resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shardwise import __version__
from shardwise.core.errors import ConfigError

from .facts import Facts, gathered
from .files import writing

ENDINGS = (".html", ".htm")
NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that no page may have: an untrained model writes them too, and names of files have them."""


def write_page(folder: Path, out: Path, option: str = "--out") -> Facts:
    """Write the page of the run in ``folder`` into ``out``, which ``option`` named, and return what it tells.

    Raises :class:`ConfigError` if the folder is none of a run, or the file cannot be written.
    """
    if out.suffix.lower() not in ENDINGS:
        raise ConfigError(f"{option} {out}: {out.suffix or 'no ending'} is not legal; legal: {', '.join(ENDINGS)}")
    facts = gathered(folder)
    text = page(facts)
    with writing(out, option):
        out.write_text(text, encoding="utf-8")
    return facts


def page(facts: Facts) -> str:
    """Return the page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_own("page.html"))
    own = {"style": Markup(_own("page.css")), "script": Markup(_own("page.js"))}
    return NO_TEXT.sub("\ufffd", template.render(facts=facts, version=__version__, svg=Markup, **own))


def _own(name: str) -> str:
    return resources("shardwise.report").joinpath(name).read_text(encoding="utf-8")

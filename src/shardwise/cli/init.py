"""``shardwise init`` writes a config that trains as it is, with the Python files that it names, as a place to start."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shardwise.core.errors import ConfigError, check_choice

CONFIG = "train.toml"


@dataclass(frozen=True)
class Template:
    """What ``shardwise init`` can write: ``does`` says what for.  Before it can train, the Python file ``first`` has to
    run, and the modules ``needs`` have to be installed.
    """

    does: str
    first: str | None = None
    needs: tuple[str, ...] = ()


TEMPLATES = {
    "gpt": Template("a small GPT on text"),
    "image": Template("a convolutional network on pictures, with a loss of your own"),
    "factory": Template("your model and your data, as two functions"),
    "finetune": Template("the weights of a Hugging Face folder, on text", "make_base.py", ("transformers",)),
    "sft": Template("the same, on questions and answers", "make_base.py", ("transformers",)),
}
"""By name, each a folder of ``shardwise/templates``."""


def contents(name: str) -> dict[str, str]:
    """Return the files of a template by name: the config first."""
    folder = files("shardwise") / "templates" / name
    found = sorted((one.name for one in folder.iterdir() if one.is_file()), key=lambda file: (file != CONFIG, file))
    return {file: (folder / file).read_text(encoding="utf-8") for file in found}


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of the template into ``folder``, which is made; :class:`ConfigError` if one of them is there."""
    check_choice("init", name, TEMPLATES)
    texts = {folder / file: text for file, text in contents(name).items()}
    taken = [path for path in texts if path.exists() or path.is_symlink()]
    if taken:
        there = (
            f"{' and '.join(map(str, taken))}: {'is' if len(taken) == 1 else 'are'} there, and init overwrites nothing"
        )
        raise ConfigError(f"{there}; legal: another folder, as in `shardwise init {name} FOLDER`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; legal: a folder that can be") from None
    return list(texts)


def commands(name: str, folder: Path) -> list[str]:
    """Return the commands that train what was written, in order."""
    first = TEMPLATES[name].first
    return [*([f"python {folder / first}"] if first else []), f"shardwise train {folder / CONFIG}"]


def run(name: str, folder: Path | None, json: bool) -> None:
    """Write the template into ``folder``, by default one of its own name, and say what to do next."""
    folder = folder or Path(name)
    written, following = write(name, folder), commands(name, folder)
    missing = [module for module in TEMPLATES[name].needs if importlib.util.find_spec(module) is None]
    if json:
        from shardwise.report.tables import print_json

        print_json({"written": list(map(str, written)), "commands": following, "missing": missing})
        return
    print(f"wrote {', '.join(map(str, written))}", "train it with:", *(f"  {one}" for one in following), sep="\n")
    for module in missing:
        print(f"note: {module} is not installed, and this needs it: pip install {module}")

"""``shardwise checkpoint`` lists, inspects and verifies what a run has saved, and exports its weights."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.core.errors import ConfigError, check_choice

from .common import Json, reported

if TYPE_CHECKING:
    from shardwise.checkpoint.reader import Checkpoint

app = typer.Typer(
    name="checkpoint",
    help="List, inspect, verify and export checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

One = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or a run's for its latest one.")
]
DTYPES = ("float32", "bfloat16", "float16", "float64")


@app.command("list")
def list_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")], json: Json = False
) -> None:
    """List the complete checkpoints of a run, and whether their manifests can be read."""
    with reported(json):
        rows = [_row(path) for path in _of_run(run_dir)]
        _print_rows(f"checkpoints of {run_dir}", rows, json)


@app.command()
def inspect(checkpoint: One, json: Json = False) -> None:
    """Show what a checkpoint holds: tensors, files, and the facts that the run saved with it."""
    with reported(json):
        _inspect(_open(checkpoint), json)


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_OR_RUN_DIR", help="A checkpoint's folder, or a run's for all of its.")
    ],
    json: Json = False,
) -> None:
    """Read every byte, and check that each file is what the manifest says; the exit code is 1 if one is not."""
    with reported(json):
        paths = [path] if _is_checkpoint(path) else _of_run(path)
        rows = [_row(one, verify=True) for one in paths]
        _print_rows(f"verified {path}", rows, json)
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: One,
    out_folder: Annotated[Path, typer.Argument(metavar="OUT_FOLDER", help="A new folder.")],
    dtype: Annotated[str | None, typer.Option(help=f"Convert floating weights: {', '.join(DTYPES)}.")] = None,
    shard_gib: Annotated[float, typer.Option(help="Split into files of about this many GiB.", min=0.001)] = 5.0,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter of model.lora alone, for peft.")
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the average of the weights (optimizer.ema) in place of the weights.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the model as safetensors, for `from_pretrained` if it is one of transformers; an adapter is merged."""
    with reported(json):
        if dtype is not None:
            check_choice("--dtype", dtype, DTYPES)
        import torch

        from shardwise.checkpoint.export import export as write
        from shardwise.report.tables import grid, make_console, print_json, show, size

        opened = _open(checkpoint)
        chosen = getattr(torch, dtype) if dtype else None
        files = write(
            opened, out_folder, shard_bytes=int(shard_gib * 2**30), dtype=chosen, adapter=adapter, average=ema
        )
        files += _companions(opened, out_folder)
        if json:
            print_json({"checkpoint": str(opened.path), "step": opened.step, "files": [str(file) for file in files]})
            return
        rows = [(file.name, size(file.stat().st_size)) for file in files]
        show(make_console(), grid(f"step {opened.step} in {out_folder}", ("file", ">size"), rows))


def _companions(opened: Checkpoint, folder: Path) -> list[Path]:
    """Copy what belongs beside a model of transformers, such as its tokenizer, where it still exists."""
    from shardwise.launch.model_folder import add_companions

    if not (folder / "config.json").exists():
        return []
    config = tomllib.loads(str(opened.meta.get("config", "")))
    return add_companions(config, opened.path.absolute().parents[1], folder)


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path means one checkpoint, by its manifest, or by its name if the manifest is gone."""
    from shardwise.checkpoint.folder import MANIFEST, step_of

    return (path / MANIFEST).exists() or step_of(path) is not None


def _of_run(path: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, or in its folder of checkpoints; raise ConfigError if there is none."""
    from shardwise.checkpoint.reader import checkpoints

    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; legal: a run's folder")
    found = checkpoints(path / "checkpoints") or checkpoints(path)
    if not found:
        raise ConfigError(f"{path}: has no complete checkpoint; legal: a run's folder with checkpoints/step_…")
    return found


def _open(path: Path) -> Checkpoint:
    """Open a checkpoint, or the latest one of a run."""
    from shardwise.checkpoint.reader import Checkpoint

    return Checkpoint.open(path if _is_checkpoint(path) else _of_run(path)[-1])


def _row(path: Path, verify: bool = False) -> dict[str, Any]:
    """Return a checkpoint's row of the table; ``error`` says why it is damaged, if it is."""
    from shardwise.checkpoint.reader import Checkpoint

    row: dict[str, Any] = {
        "path": str(path),
        "step": None,
        "ranks": None,
        "tensors": None,
        "bytes": None,
        "error": None,
    }
    try:
        opened = Checkpoint.open(path)
        row |= {
            "step": opened.step,
            "ranks": opened.manifest.ranks,
            "tensors": len(opened.tensors),
            "bytes": opened.nbytes,
        }
        if verify:
            opened.verify()
    except ConfigError as error:
        row["error"] = str(error)
    return row


def _print_rows(title: str, rows: list[dict[str, Any]], json: bool) -> None:
    from shardwise.report.tables import grid, make_console, print_json, show, size

    if json:
        print_json({"checkpoints": rows})
        return
    cells = []
    for row in rows:
        known = (row["tensors"], row["ranks"], size(row["bytes"])) if row["bytes"] is not None else ("", "", "")
        cells.append((Path(row["path"]).name, *known, "damaged" if row["error"] else "ok"))
    console = make_console()
    show(console, grid(title, ("checkpoint", ">tensors", ">ranks", ">size", "state"), cells))
    for row in rows:
        if row["error"]:
            console.print(row["error"], markup=False)


def _inspect(opened: Checkpoint, json: bool) -> None:
    from shardwise.report.tables import count, grid, make_console, pairs, print_json, show, size

    if json:
        tensors = {
            name: {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch."), "pieces": len(one.pieces)}
            for name, one in opened.tensors.items()
        }
        files = {name: {"bytes": file.nbytes, "sha256": file.sha256} for name, file in opened.manifest.files.items()}
        print_json(
            {
                "path": str(opened.path),
                "step": opened.step,
                "meta": dict(opened.meta),
                "files": files,
                "tensors": tensors,
            }
        )
        return
    plain = {key: value for key, value in opened.meta.items() if not isinstance(value, dict) and "\n" not in str(value)}
    states = dict.fromkeys(name.rpartition(".")[2] for name in opened.tensors if name.startswith("optimizer."))
    elements = sum(
        one.nbytes // one.dtype.itemsize for name, one in opened.tensors.items() if name.startswith("model.")
    )
    about = {
        "step": opened.step,
        "saved by": f"{opened.manifest.ranks} rank{'s' * (opened.manifest.ranks != 1)}",
        "files": f"{len(opened.manifest.files)}, {size(opened.nbytes)}",
        "model": f"{count(elements)} elements",
        "optimizer": ", ".join(states) or "no state",
    }
    rows = [
        (
            name.removeprefix("model."),
            "×".join(map(str, one.shape)) or "scalar",
            str(one.dtype).removeprefix("torch."),
            size(one.nbytes),
        )
        for name, one in sorted(opened.tensors.items())
        if not name.startswith(("optimizer.", "ema.", "outer.", "island"))
    ]
    tables = pairs(str(opened.path), {**about, **{key: value for key, value in plain.items() if key != "step"}})
    show(make_console(), tables, grid("tensors", ("name", "shape", "dtype", ">size"), rows))

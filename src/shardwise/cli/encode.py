"""``shardwise encode`` turns a corpus into vectors on all devices, in order, and goes on where it was ended."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from rich.console import Console

from shardwise.config import Hardware
from shardwise.config.factories import load_function
from shardwise.core.errors import ConfigError
from shardwise.data.texts import Texts
from shardwise.launch.devices import check_ranks, check_torch
from shardwise.launch.encoding import OUTPUTS, Job, Work, part_of
from shardwise.launch.local import clear_logs, run_folder
from shardwise.launch.sentences import Recipe
from shardwise.report.tables import make_console, pairs, print_json, show

from .counted import launch_counted

HANG = 600.0  # seconds without progress: ranks do not wait for each other
PRECISIONS = ("fp32", "bf16", "fp16")


def run(
    source: Path, model: str, out: Path, field: str, pooling: str | None, normalize: bool | None, length: int | None,
    batch_size: int, precision: str, ranks: int | None, threads: int | None, json: bool,
) -> None:  # fmt: skip
    """Encode each row of ``source`` into a vector, in order, into ``out``."""
    start = time.monotonic()
    check_torch()
    if out.suffix not in OUTPUTS:
        raise ConfigError(f"--out {out}: {out.suffix or 'no ending'} is not legal; legal: {', '.join(OUTPUTS)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: legal: {', '.join(PRECISIONS)}")
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; legal: another name, or to delete it")
    texts, hardware = Texts(source, field), Hardware.here()
    many = ranks or hardware.gpus or 1
    check_ranks(many, many)
    each = threads or max(1, hardware.cores // many)
    job = _job(source, texts, model, pooling, normalize, length, batch_size, precision, each)
    folder = part_of(out)
    with run_folder(folder, f"--out {out}"):
        work = Work.begin(out, job)
        before = int(work.done().sum())
        many = max(1, min(many, job.chunks - before))
        clear_logs(folder)
        _launch(work, many, None if json else make_console())
        shape = work.finish(out)
    found = {
        "out": str(out), "rows": shape[0], "width": shape[1], "ranks": many,
        "resumed_rows": min(before * job.chunk, job.rows), "seconds": time.monotonic() - start,
    }  # fmt: skip
    if json:
        print_json(found)
        return
    resumed = f", of which {found['resumed_rows']:,} rows were there" if before else ""
    speed = (job.rows - min(before * job.chunk, job.rows)) / (time.monotonic() - start)
    rows = {
        "vectors": f"{shape[0]:,} x {shape[1]}{resumed}",
        "speed": f"{speed:,.0f} rows/s on {many} rank{'s' if many > 1 else ''}, the start included",
        "file": str(out),
    }
    show(make_console(), pairs("encoded", rows))


def _job(
    source: Path, texts: Texts, model: str, pooling: str | None, normalize: bool | None, length: int | None,
    batch_size: int, precision: str, threads: int,
) -> Job:  # fmt: skip
    digest = hashlib.sha256(texts.digest.encode())
    common = {"source": str(source.absolute()), "field": texts.field, "rows": len(texts), "batch_size": batch_size}
    if ".py:" in model:
        if pooling is not None or normalize is not None or length is not None or precision != "fp32":
            legal = "left out, for they belong to the folder of a model"
            raise ConfigError(f"--model {model}: --pooling, --normalize, --max-length and --precision: legal: {legal}")
        place, _, function = model.rpartition(":")
        model = f"{Path(place).absolute()}:{function}"
        load_function("--model", model)
        digest.update(Path(place).read_bytes())
        return Job(
            **common, model=model, digest=digest.hexdigest(), pooling="", normalize=False, length=0,  # type: ignore[arg-type]
            precision=precision, threads=threads,
        )  # fmt: skip
    recipe = Recipe.of(Path(model).absolute(), pooling, normalize, length)
    try:
        import transformers  # noqa: F401 - a missing extra is told before ranks start
    except ImportError as error:
        raise ConfigError(f"--model {model}: {error}; legal: pip install shardwise[transformers]") from None
    for path in sorted(one for one in recipe.folder.iterdir() if one.is_file()):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return Job(
        **common, model=str(Path(model).absolute()), digest=digest.hexdigest(), pooling=recipe.pooling,  # type: ignore[arg-type]
        normalize=recipe.normalize, length=recipe.length, precision=precision, threads=threads,
    )  # fmt: skip


def _launch(work: Work, ranks: int, console: Console | None) -> None:
    """Do the chunks that are left, on ranks that this process starts and watches."""
    job, folder = work.job, work.folder.absolute()
    if bool(work.done().all()):
        return
    launch_counted(
        ["-m", "shardwise.launch.encoder", str(folder)], ranks, folder, threads=job.threads, hang_timeout=HANG,
        console=console, doing=f"encoding on {ranks} ranks", total=job.chunks, done=lambda: int(work.done().sum()),
    )  # fmt: skip

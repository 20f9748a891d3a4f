"""``shardwise bench collectives`` starts ranks that time collectives, or is one of them under torchrun."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.backend import Backend
from shardwise.config import Hardware
from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.core.links import OWN, LinkProfile, Measured
from shardwise.core.rounds import ALGORITHMS
from shardwise.launch.collectives import BACKEND, EVERY, JOB, ROWS, Job, backend_of, joined, measure
from shardwise.launch.devices import check_ranks, check_torch
from shardwise.launch.local import run_folder, under_torchrun
from shardwise.report.figures import check_format
from shardwise.report.files import write_whole
from shardwise.report.links import draw, tables
from shardwise.report.tables import make_console, pairs, print_json, show

from .counted import launch_counted

HANG = 120.0  # seconds without progress


def run(
    ranks: Sequence[int], host: int | None, sizes: tuple[int, ...], of: Sequence[str], by: Sequence[str], backend: str,
    out: Path | None, picture: Path | None, json: bool,
) -> None:  # fmt: skip
    """Measure, and print tables or JSON; write the profile to ``out`` and the picture to ``picture``."""
    check_torch()
    if picture is not None:
        check_format(picture, "--picture")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: is there already; legal: another name, or to delete it")
    collectives, algorithms = _chosen("--of", of, EVERY), _chosen("--by", by, (OWN, *ALGORITHMS))
    first = Job(0, 0, sizes, collectives, algorithms, backend)
    rows: list[Measured] = []
    through: str | None = None
    if under_torchrun():
        here, every = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        if ranks and tuple(ranks) != (every,):
            raise ConfigError.on("--ranks", f"{', '.join(map(str, ranks))}, under torchrun", f"none, or {every}")
        host = host or here
        job = _checked(replace(first, ranks=every, host=host))
        comm = joined(job)
        through = backend_of(comm, job)
        rows = [row for row in measure(comm, job) if row is not None]
        if os.environ["RANK"] != "0":
            return
    else:
        for many in ranks or (Hardware.here().gpus or 2,):
            check_ranks(many, many)
            through, found = _measured_here(replace(first, ranks=many, host=host or many), json)
            rows += found
    assert through is not None
    profile = LinkProfile(through, Backend.here().type, host or max(r.ranks for r in rows), tuple(rows))
    _tell(profile, out, picture, json)


def _chosen(option: str, given: Sequence[str], legal: Sequence[str]) -> tuple[str, ...]:
    for one in given:
        if one not in legal:
            raise ConfigError(f"{option} {one}: legal: {', '.join(legal)}.{did_you_mean(one, legal)}")
    return tuple(one for one in legal if one in given or not given)


def _checked(job: Job) -> Job:
    """Raise :class:`ConfigError` if there is nothing to measure."""
    if not job.cases():
        wrong = f"{', '.join(job.algorithms)} for {', '.join(job.collectives)} of {job.ranks} ranks: there is none"
        raise ConfigError.on("--by", wrong, "an algorithm that one of the collectives has there")
    return job


def _measured_here(job: Job, json: bool) -> tuple[str, list[Measured]]:
    """Return the backend of ranks that this process starts, and what they have measured."""
    cases = len(_checked(job).cases())
    with TemporaryDirectory(prefix="shardwise-bench-") as place:
        folder = Path(place)
        (folder / JOB).write_text(jsonlib.dumps(asdict(job)), encoding="utf-8")
        with run_folder(folder, "bench"):
            launch_counted(
                ["-m", "shardwise.launch.collectives", str(folder)], job.ranks, folder, threads=1, hang_timeout=HANG,
                console=None if json else make_console(stderr=True), doing=f"measuring on {job.ranks} ranks",
                total=cases, done=lambda: len(_read(folder)),
            )  # fmt: skip
        rows = [Measured(**jsonlib.loads(line)) for line in _read(folder)]
        return (folder / BACKEND).read_text(encoding="utf-8"), rows


def _read(folder: Path) -> list[str]:
    """Return the lines that have been written so far."""
    path = folder / ROWS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _tell(profile: LinkProfile, out: Path | None, picture: Path | None, json: bool) -> None:
    if out is not None:
        write_whole(out, profile.to_json())
    if picture is not None:
        draw(profile, picture)
    counts = dict.fromkeys(r.ranks for r in profile.rows)
    links = {n: profile.link(n, between=n > profile.host) for n in counts}
    if json:
        found: dict[str, Any] = jsonlib.loads(profile.to_json())
        for row, one in zip(found["rows"], profile.rows, strict=True):
            row |= {"algorithm_bandwidth": one.algorithm_bandwidth, "bus_bandwidth": one.bus_bandwidth}
        found["links"] = {n: None if link is None else asdict(link) for n, link in links.items()}
        print_json(found)
        return
    console = make_console()
    console.print("* the fastest of its size; sent: by the busiest rank; bandwidths: as nccl-tests defines them\n")
    show(console, *tables(profile))
    words = {
        f"{n} ranks": f"{link.latency * 1e6:.0f} µs a collective, {link.bandwidth / 1e9:.3f} GB/s sent by a rank"
        for n, link in links.items()
        if link is not None
    }
    if words:
        show(console, pairs("the link that fits the backend's own collectives best", words))
    for path in (out, picture):
        if path is not None:
            console.print(str(path))

"""Python processes that start with torch and shardwise imported: what tests and the commands that they test start with
``subprocess``.

A Python process of a test spends two to three seconds of a core on imports, and a command with four ranks is five
processes.  Here a *server*, a process of one thread that has imported everything and done nothing, forks them instead.
They are children of whoever starts them, as ``Popen`` promises (the server forks twice, and orphans go to the process
that has declared itself their reaper), and each of them has forked a server of its own before it does anything else,
for the processes that it starts.

What differs from a fresh interpreter: the modules that are imported, variables that libraries read while they are
loaded, and the seed of ``hash``, which is the server's.  Tests about these are marked ``fresh`` and start real ones;
with SHARDWISE_FRESH=1 in the environment all do.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch", "torch._dynamo", "torch.export", "torch.distributed.elastic.multiprocessing",
    "torch.distributed.launcher.api",
    "torch._functorch.aot_autograd", "torch.fx.experimental.validator", "sympy.tensor.tensor", "torch.distributed.run",
    "shardwise", "shardwise.cli.main", "shardwise.cli.train", "shardwise.launch.training", "shardwise.launch.worker",
    "shardwise.launch.run", "shardwise.launch.ready", "shardwise.launch.forecast", "shardwise.models",
)  # fmt: skip
SET_CHILD_SUBREAPER = 36  # of prctl(2)
ROOM = 1 << 16  # bytes for the command lines, and for the environments, that the system shows for forked processes
KEPT = 8  # file descriptors, beside the standard ones, that a process can be given
APART = 512  # a file descriptor beyond those that are given
IN_NAMESPACE = ["ip", "netns", "exec"]  # then its name, and what is run there
CLONE_NEWNET = 0x40000000  # of setns(2): the network
PLAIN = {"-u"}  # options of the interpreter that change nothing here
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not every system has it


class Server:
    """A process that forks others on request, for one process at a time."""

    def __init__(self, request: socket.socket) -> None:
        self.request = request

    @classmethod
    def fresh(cls) -> Server:
        """One in a new interpreter: for a process that has threads, or has run a backward."""
        ours, theirs = socket.socketpair()
        folder, number = os.path.dirname(os.path.abspath(__file__)), theirs.fileno()
        code = f"import sys; sys.path.insert(0, {folder!r}); import forked; del sys.path[0]; forked.main({number})"
        room, nothing = "-" * ROOM, subprocess.DEVNULL
        with theirs, fresh():
            process = subprocess.Popen(
                [sys.executable, "-c", code, room],
                env={**os.environ, "ROOM": room},
                pass_fds=[number],
                stdin=nothing,
                stdout=nothing,
            )
        atexit.register(lambda: (ours.close(), process.wait()))
        return cls(ours)

    @classmethod
    def forked(cls, program: list[str]) -> tuple[Server, list[str]]:
        """One that is a copy of this process, which has done nothing yet, and what to run.

        In the processes that it starts this returns as well, with a server of their own and their program.
        """
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            return cls(ours), program
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        return cls.forked(serve(theirs))

    def start(self, command: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        _adopt(True)
        try:
            message = json.dumps(command).encode()
            socket.send_fds(self.request, [len(message).to_bytes(8, "big")], streams)
            self.request.sendall(message)
            return int.from_bytes(_receive(self.request, 8), "big")
        finally:
            _adopt(False)


_unforked = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_server: Server | None = None


def _execute_fresh(self, *given):
    with on_cores(set(CORES)):  # the tests of this process keep to one
        _unforked(self, *given)


def _execute_child(  # noqa: PLR0917 - the interpreter's own method, 3.11 and later
    self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
):  # fmt: skip
    global _server
    words = (
        [os.fsdecode(word) for word in args] if not isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(args)]
    )
    namespace, inner = (words[3], words[4:]) if words[:3] == IN_NAMESPACE else ("", words)
    program = None if shell or executable or preexec_fn else _program(inner)
    if program is None:
        _execute_fresh(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
        )  # fmt: skip
        return
    if _server is None:
        _server = Server.fresh()
    sys.stdout.flush()
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()}
    folder = os.fsdecode(os.getcwd() if cwd is None else cwd)
    command = {
        "program": program,
        "namespace": namespace,
        "env": variables,
        "cwd": os.path.abspath(folder),
        "session": bool(more[5]),
        "kept": list(pass_fds),
    }
    streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    self.pid = _server.start(command, [*streams, *pass_fds])
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def install(fork: bool = True) -> None:
    """From now on ``subprocess`` lets a server fork what this interpreter would run, or starts a real one."""
    subprocess.Popen._execute_child = _execute_child if fork else _execute_fresh  # type: ignore[attr-defined]


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Meanwhile this thread, and what it starts, runs on ``cores``; on all that there are if there is none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def fresh() -> Iterator[None]:
    """Meanwhile ``subprocess`` starts real interpreters."""
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    install(fork=False)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


def _program(words: Sequence[str]) -> list[str] | None:
    """What a command line lets Python run, as ["-m" or "-c" or "", what, arguments ...]; None if it is not for this
    interpreter.
    """
    first, *rest = words
    if Path(first).parent == Path(sys.executable).parent and Path(first).read_bytes()[:2] == b"#!":
        return ["", *words]
    if first != sys.executable:
        return None
    while rest and rest[0] in PLAIN:
        del rest[0]
    if rest and rest[0] in ("-m", "-c"):
        return rest
    return None if not rest or rest[0].startswith("-") else ["", *rest]


def serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request until there is nobody left who could make one.

    Returns in those processes only: what they are to run, as :func:`_program` gives it.
    """
    while True:
        header, streams, _, _ = socket.recv_fds(requests, 8, 3 + KEPT)
        if not header:
            os._exit(0)
        command = json.loads(_receive(requests, int.from_bytes(header, "big")))
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            inner = os.fork()
            if inner:
                os.write(tell, inner.to_bytes(8, "big"))
                os._exit(0)  # which makes the other a child of the process that asks
            while os.getppid() == middle:
                pass
            requests.detach()
            become(command, streams)
            program: list[str] = command["program"]
            return program
        os.waitpid(middle, 0)
        requests.sendall(os.read(told, 8))
        for each in (*streams, told, tell):
            os.close(each)


def become(command: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Make this process look like one that was started for the command."""
    apart = [fcntl.fcntl(each, fcntl.F_DUPFD, APART) for each in streams]  # so that none is where another belongs
    os.closerange(3, APART)
    for own, given in zip((0, 1, 2, *command["kept"]), apart, strict=True):
        os.dup2(given, own)
    os.closerange(APART, 1 << 16)
    if command["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where a shell started the tests in the background
    if command["namespace"]:
        _enter(command["namespace"])
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)):
        errors = "strict" if number == 1 else "backslashreplace"
        lines = unbuffered or number == 2 or os.isatty(number)
        stream = open(number, "w", buffering=1 if lines else -1, errors=errors, closefd=False)  # noqa: SIM115
        if unbuffered:
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _enter(namespace: str) -> None:
    """Move this process into a network namespace that ``ip netns`` has made."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no network namespace {namespace}")


def _run(program: Sequence[str], path: Sequence[str]) -> None:
    """Run a program as the interpreter would, which looks for modules in PYTHONPATH and then along ``path``; the
    process ends with it.
    """
    import numpy
    import torch

    kind, what, *arguments = program
    random.seed()
    numpy.random.seed()  # noqa: NPY002
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    _show([sys.executable, *(program if kind else program[1:])])
    if kind == "-m":
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning, "runpy")
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *arguments]
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [what, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        runpy.run_path(what, run_name="__main__")


def _show(command: Sequence[str]) -> None:
    """Let the system show this command line and these environment variables for the process: in the memory of those it
    was started with.
    """
    with open("/proc/self/stat") as file:
        first, last, env_first, env_last = map(int, file.read().rpartition(")")[2].split()[45:49])
    for start, end, words in (
        (first, last, command),
        (env_first, env_last, [f"{k}={v}" for k, v in os.environ.items()]),
    ):
        block = "".join(f"{word}\0" for word in words).encode(errors="surrogateescape")[: end - start - 1]
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = connection.recv(size - len(found))
        if not some:
            raise ConnectionError("the server of forked processes has ended")
        found += some
    return found


def _adopt(ours: bool) -> None:
    """Whether orphans among the descendants become children of this process."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(ours), 0, 0, 0)


def main(number: int) -> None:
    """The server of :meth:`Server.fresh`, whose socket has this number, and in the processes that it starts their
    command.
    """
    global _server
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in sys.path if path and path not in given]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _server, program = Server.forked(serve(socket.socket(fileno=number)))
    install()
    _run(program, paths)

"""Ask the makers' own tools and the kernel about a machine's GPUs, without torch, and say which build of torch is made
for them.

``python -I src/shardwise/drivers.py 2.13.0`` prints that build, such as ``cu130`` or ``cpu``: scripts/install.sh asks
this way before there is a torch, so only the standard library is imported.  A tool that is missing, fails or takes too
long says nothing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0  # the seconds that a tool has for its answer; a driver that hangs must not hold up a run
INDEX = "https://download.pytorch.org/whl/"
CSV = "--format=csv,noheader"
Version = tuple[int, int]

# These are the CUDA versions for which torch publishes builds on its index for Linux, by torch's own version; for later
# versions the last row is taken to hold.
CUDA_BUILDS: Mapping[Version, Sequence[Version]] = {
    (2, 11): ((12, 6), (12, 8), (12, 9), (13, 0)),
    (2, 12): ((12, 6), (13, 0), (13, 2)),
    (2, 13): ((12, 6), (12, 9), (13, 0), (13, 2)),
}
ROCM_BUILD = "rocm7.2"  # published for each of these versions of torch
XPU_BUILD = "xpu"
CPU_BUILD = "cpu"
# Builds for CUDA 12.6 have kernels from MAXWELL on for what is older than BLACKWELL, later ones from TURING on.
MAXWELL, TURING, BLACKWELL = (5, 0), (7, 5), (10, 0)


@dataclass(frozen=True)
class Holder:
    """This is a process that holds ``memory`` bytes of the card ``uuid``."""

    pid: int
    name: str
    memory: int
    uuid: str


CHOOSES = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES", "Intel": "ONEAPI_DEVICE_SELECTOR"}
"""This is, by maker, the environment variable that says which cards a process sees."""


@dataclass(frozen=True)
class Driver:
    """These are the GPUs of one maker, with the newest CUDA that their driver ``runs`` and, where known, their compute
    ``capabilities``."""

    maker: str
    cards: tuple[str, ...]
    version: str | None = None
    runs: Version | None = None
    capabilities: tuple[Version, ...] = ()

    def __str__(self) -> str:
        """Return ``2 x NVIDIA H100 80GB HBM3``, with ``and`` between several kinds."""
        counts = {name: self.cards.count(name) for name in self.cards}
        return " and ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())

    @property
    def hides(self) -> str:
        """Return the environment variable that says which cards a process sees."""
        return CHOOSES[self.maker]

    @property
    def hidden(self) -> str:
        """Return what hides the cards, for those who want to train on CPUs."""
        return f'{self.hides}="{"*:cpu" if self.maker == "Intel" else ""}"'

    def serves(self, torch: str) -> bool:
        """Return whether some build of ``torch`` has kernels for all the cards, whatever their driver runs."""
        return self.maker != "NVIDIA" or _cuda_build(torch, None, self.capabilities) is not None

    def unserved(self, torch: str) -> str:
        """Return what to do where no build serves all the cards."""
        return f"no build of torch {torch} has kernels for all of them; hide those of one kind with {self.hides}"

    def build(self, torch: str) -> str | None:
        """Return the build of ``torch``, such as 2.13.0, that is made for these cards and this driver; None where a
        newer driver is needed, or no build serves all cards."""
        if self.maker == "NVIDIA":
            return _cuda_build(torch, self.runs, self.capabilities)
        return ROCM_BUILD if self.maker == "AMD" else XPU_BUILD


def install(torch: str, build: str) -> str:
    """Return the command that installs a build of ``torch``; without the +, pip keeps another build of that version."""
    return f"pip install torch=={torch.partition('+')[0]}+{build} --index-url {INDEX}{build}"


def found(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Driver | None:
    """Return the GPUs that this machine has and ``environment`` does not hide: NVIDIA's, else AMD's, else Intel's."""
    makers = (
        (nvidia, ("CUDA_VISIBLE_DEVICES",)),
        (amd, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
        (intel, ("ONEAPI_DEVICE_SELECTOR",)),
    )
    for look, variables in makers:
        if not any(hides(environment.get(name)) for name in variables) and (driver := look(root)) is not None:
            return driver
    return None


def hides(value: str | None) -> bool:
    """Return whether a variable such as CUDA_VISIBLE_DEVICES hides all devices.

    Nothing is visible from the first entry on that is no number.  Intel's variable names the kind of devices to show.
    """
    first = "none set" if value is None else value.strip().partition(",")[0].strip()
    return first in ("", "-1", "NoDevFiles") or first.endswith(":cpu")


def nvidia(root: Path = Path("/")) -> Driver | None:
    """Return the NVIDIA GPUs that nvidia-smi shows, or else the kernel's module, where this process may have a card."""
    asked = (
        "name,driver_version,compute_cap",
        "name,driver_version",
    )  # drivers before 510 do not know what a capability is
    listed = next(
        (rows for query in asked if (rows := parse_cards(said("nvidia-smi", f"--query-gpu={query}", CSV)))), []
    )
    if listed:
        runs = parse_cuda(said("nvidia-smi"))
        capabilities = tuple(capability for _, _, capability in listed if capability is not None)
        return Driver("NVIDIA", tuple(name for name, _, _ in listed), listed[0][1], runs, capabilities)
    if not any(
        (root / "dev").glob("nvidia[0-9]*")
    ):  # a container sees the host's /proc, also when it may not use the cards
        return None
    told = (_text(file) for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")))
    cards = tuple(match[1].strip() for text in told if (match := re.search(r"^Model:(.*)$", text, re.MULTILINE)))
    version = re.search(r"Kernel Module\D*?(\d+(?:\.\d+)+)", _text(root / "proc/driver/nvidia/version"))
    return Driver("NVIDIA", cards, version and version[1]) if cards else None


def amd(root: Path = Path("/")) -> Driver | None:
    """Return the AMD GPUs that ROCm's tools show: processors with graphics have /dev/kfd too, mostly without ROCm."""
    cards = parse_amd(said("rocm-smi", "--showproductname")) or parse_amd(said("amd-smi", "static", "--asic"))
    return Driver("AMD", cards, _text(root / "sys/module/amdgpu/version").strip() or None) if cards else None


def intel(root: Path = Path("/")) -> Driver | None:
    """Return the Intel GPUs that the kernel shows, without those that are part of the processor, by their address."""
    if not any(
        (root / "dev/dri").glob("renderD*")
    ):  # a container sees the host's /sys, also when it may not use the cards
        return None
    nodes = sorted((root / "sys/class/drm").glob("renderD*/device"))
    cards = [
        node for node in nodes if _text(node / "vendor").strip() == "0x8086" and node.resolve().name != "0000:00:02.0"
    ]
    return Driver("Intel", ("Intel GPU",) * len(cards)) if cards else None


def holders(uuid: str, own: Collection[int] = ()) -> list[Holder]:
    """Return the processes besides ``own`` that hold memory of an NVIDIA card, most first; [] if no driver tells."""
    query = "--query-compute-apps=pid,process_name,used_memory,gpu_uuid"
    listed = parse_holders(said("nvidia-smi", query, f"{CSV},nounits"))
    there = [one for one in listed if one.uuid == _bare(uuid) and one.pid not in own]
    return sorted(there, key=lambda one: -one.memory)


# ---- what tools print ------------------------------------------------------------------------------------------------


def parse_cards(text: str) -> list[tuple[str, str, Version | None]]:
    """Return name, driver version and capability from lines such as ``NVIDIA H200, 570.86.15, 9.0``, or without it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [(row[0], row[1], _version(row[2]) if len(row) > 2 else None) for row in rows if len(row) > 1]


def parse_cuda(text: str) -> Version | None:
    """Return the newest CUDA that the driver runs, from the head of what nvidia-smi prints; newer ones say "UMD"."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)
    return match and _version(match[1])


def parse_amd(text: str) -> tuple[str, ...]:
    """Return the names that rocm-smi (``GPU[0] : Card Series: AMD Instinct MI300X``) or amd-smi (``MARKET_NAME: …``)
    prints."""
    return tuple(match.strip() for match in re.findall(r"(?:Card [Ss]eries|MARKET_NAME):\s*(.+)", text))


def parse_holders(text: str) -> list[Holder]:
    """Return the holders that lines such as ``4242, /usr/bin/python3, 70210, GPU-…`` (in MiB) name.

    A container can hide names and numbers."""
    made = []
    for line in text.splitlines():
        first, _, rest = line.partition(",")
        cells = [cell.strip() for cell in rest.rsplit(",", 2)]
        if first.strip().isdigit() and len(cells) == 3:
            name, memory, uuid = cells
            made.append(
                Holder(int(first), name.rpartition("/")[2], int(memory) << 20 if memory.isdigit() else 0, _bare(uuid))
            )
    return made


def said(tool: str, *arguments: str) -> str:
    """Return what a tool prints, "" where it says nothing."""
    quiet = subprocess.DEVNULL
    try:
        asked = subprocess.Popen(
            [tool, *arguments],
            stdin=quiet,
            stdout=subprocess.PIPE,
            stderr=quiet,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        return ""
    try:
        told, _ = asked.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(
            asked.pid, signal.SIGKILL
        )  # with what a wrapper has started; it is not waited for, since a driver may hold it
        return ""
    return told if asked.returncode == 0 else ""


# ---- builds ----------------------------------------------------------------------------------------------------------


def _cuda_build(torch: str, runs: Version | None, capabilities: Sequence[Version]) -> str | None:
    """Return the newest build that the driver knows and all cards have kernels in.

    A driver also runs a newer CUDA of its own major version: the oldest of these is then taken.  Where the driver does
    not say what it runs, it is taken to run all.
    """
    published = CUDA_BUILDS.get(_version(torch) or (0, 0), CUDA_BUILDS[max(CUDA_BUILDS)])
    legal = [one for one in published if all(has_kernels(one, capability) for capability in capabilities)]
    if runs is not None:
        known = [one for one in legal if one <= runs]
        same = [one for one in legal if one[0] == runs[0]]
        legal = known[-1:] or same[:1]
    elif legal:
        legal = [one for one in legal if one <= (13, 0)][-1:] or legal  # what PyPI has
    return f"cu{legal[-1][0]}{legal[-1][1]}" if legal else None


def has_kernels(build: Version, capability: Version) -> bool:
    """Return whether torch's builds for a version of CUDA have kernels for cards of a compute capability."""
    return MAXWELL <= capability < BLACKWELL if build <= (12, 6) else capability >= TURING


def in_words(version: Version | None) -> str:
    """Return a version in words, such as ``12.8``."""
    return "an unknown version" if version is None else f"{version[0]}.{version[1]}"


def _version(text: str) -> Version | None:
    match = re.match(r"\s*(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU|MIG)-", "", uuid.strip()).lower()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main(arguments: Sequence[str], tell: Callable[[str], object] = print) -> None:
    """Print the build of a version of torch to install here."""
    driver = found()
    build = None if driver is None else driver.build(arguments[0])
    if driver is not None and build is None:
        mend = (
            f"the driver is too old for torch {arguments[0]}; update it, and install again"
            if driver.serves(arguments[0])
            else f"{driver.unserved(arguments[0])}, and install again"
        )
        print(f"{driver}: {mend}", file=sys.stderr)
    elif driver is not None and build == XPU_BUILD:  # large, and few who have such a card want it
        print(f"{driver}: for it, run .venv/bin/{install(arguments[0], XPU_BUILD)}", file=sys.stderr)
        build = None
    tell(build or CPU_BUILD)


if __name__ == "__main__":
    main(sys.argv[1:])

"""This module has the options of a plan for local training: groups of ranks train apart, and meet now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.options import check_options, count, number

ISLANDS = "islands"
"""The mesh axis of local training: ranks that differ on it train models of their own between two outer steps."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """These options say when islands meet, and what they then do.

    Each island takes ``steps`` optimizer steps by itself.  Then comes an outer step: the mean over islands of how far
    their parameters have moved is taken as a gradient, and stochastic gradient descent with Nesterov momentum takes a
    step of rate ``outer_lr`` from where they were at the outer step before (DiLoCo: Douillard et al. 2023, arXiv
    2311.08105, algorithm 1).  Rate 1 and momentum 0 are local SGD: islands go on from the mean of their parameters
    (Stich 2018, arXiv 1805.09767).

    With several ``fragments`` a part of the parameters meets at a time, and what islands exchange is under way while
    they compute the next step.  Its parameters are then ``mix`` of each island's own, and the rest of what the outer
    step gives (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512, sections 2.2 and 2.3).
    """

    steps: int = count(0, least=0, key="local_steps")
    fragments: int = count(1, key="local_fragments")
    mix: float = number(0.5, most=1.0, key="local_mix")
    outer_lr: float = number(0.7, key="outer_lr")
    outer_momentum: float = number(0.9, below=1.0, key="outer_momentum")

    def __post_init__(self) -> None:
        check_options(self)
        if self.fragments > max(self.steps, 1):
            wrong = f"{self.fragments} are more than local_steps = {self.steps}, in which each of them meets once"
            raise ConfigError.on("local_fragments", wrong, f"1 to {max(self.steps, 1)}")

    @property
    def streams(self) -> bool:
        """Return whether fragments meet one at a time, under computing."""
        return self.fragments > 1

    def due(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose outer step is at the end of this step, counted from 0.

        Fragments that stream are sent when the step begins, so none is due in step 0, before which nothing has moved.
        """
        if not self.steps:
            return ()
        if not self.streams:
            return (0,) if (step + 1) % self.steps == 0 else ()
        places = (k * self.steps // self.fragments for k in range(self.fragments))
        return tuple(k for k, place in enumerate(places) if step > 0 and step % self.steps == place)

    @property
    def first_due(self) -> tuple[int, ...]:
        """Return the fragments of the first step in which islands meet; none where there are no islands."""
        return next(filter(None, map(self.due, range(2 * self.steps))), ())

    def check_mesh(self, mesh: Mesh, overlaps: bool, offloads: bool) -> None:
        """Raise :class:`ConfigError` if islands and ``steps`` do not go together, or not with what else there is."""
        islands = mesh.axis_size(ISLANDS)
        if bool(self.steps) != (islands > 1):
            wrong = f"{self.steps} is not legal with {islands} group{'s' * (islands > 1)} of ranks"
            raise ConfigError.on("local_steps", wrong, "0, or 1 or more with dp_replicate of 2 or more")
        if self.steps and overlaps:
            wrong = f"{self.steps} is not legal where batches overlap, as no step then ends on all stages at once"
            raise ConfigError.on("local_steps", wrong, '0, or a schedule such as "1f1b" with norm = "barrier"')
        if self.streams and offloads:
            wrong = f"{self.fragments} are not legal with an optimizer on the host"
            raise ConfigError.on("local_fragments", wrong, '1, or offload = "none"')


def fragments_of(sizes: Sequence[int], fragments: int) -> tuple[int, ...]:
    """Return the fragment of each block of parameters, given their sizes: the largest first, each to the fragment that
    has least so far.  Raises :class:`ConfigError` where there are fewer blocks than fragments."""
    if len(sizes) < fragments:
        wrong = f"{fragments} are more than the {len(sizes)} blocks of parameters of the model"
        raise ConfigError.on("local_fragments", wrong, f"1 to {len(sizes)}")
    held, found = [0] * fragments, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = held.index(min(held))
        found[index] = least
        held[least] += max(sizes[index], 1)
    return tuple(found)

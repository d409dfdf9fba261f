"""One strategy on several meshes: bounds first, then solving from the lowest bound on, until nothing better can be left.

A mesh is solved only if its bounds leave room for a better plan: its compute alone (no tables), then what is foreseen without a
solver, then its relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.plan import MeshTried
from meshwright.planner.on_mesh import Found, OnMesh
from meshwright.planner.solve.optimise import Effort, Excluded, NoPlanFoundError

_NOTHING_FITS = float("inf")
# Bounds further above the lowest than this part of it are not made any tighter: such meshes are looked at last.
_CLOSE = 0.03
# A mesh is looked at so often: roughly, then as well as it takes.
_LOOKS = 2
# Bounds that should differ by a part do not because of how numbers are rounded.
_ROUNDED = 1 + 1e-9
# How often the solver is shown memory that it did not see, and how much more than that.
_TIGHTENINGS, _SAFELY = 6, 1.01
# How many of the finer meshes are solved, and what is said of them.
_REFINED = 2
_FEW_ROWS = "tried with the rows of the plans above alone"


@dataclass
class Race:
    """The best plan so far, and what became of each mesh.

    Attributes:
        name: of the strategy.
        effort: of the solver.
        known_s: time of a plan that is known already: only faster ones are of interest.
        peak_of: what a finished plan holds at its peak and the op that runs then; None where the solver's own count is enough.
        best: the best plan so far.
        tried: what became of each mesh, in the order looked at.
        refused: the error of the first mesh that the batch or a pin does not suit.
    """

    name: str
    effort: Effort
    known_s: float = math.inf
    peak_of: Callable[[Found], tuple[int, str]] | None = None
    best: Found | None = None
    tried: list[tuple[OnMesh, MeshTried]] = field(default_factory=list)
    refused: InputError | None = None
    _points: dict[str, None] = field(default_factory=dict)

    def run(self, meshes: Sequence[OnMesh]) -> Race:
        """Look at every mesh: bounds first; those well above the lowest need not be tight."""
        bounds: dict[int, float] = {}
        for k, bound in self._bounds(meshes):
            if bound < self.beat_s and meshes[k].is_foreseen(self.name):  # then it costs next to nothing to know it
                self._look_at(meshes[k], bound)
            else:
                bounds[k] = bound
        for k in sorted(bounds, key=lambda k: (bounds[k], k)):
            self._look_at(meshes[k], bounds[k])
        return self

    def bounds_s(self, meshes: Sequence[OnMesh], enough_s: float = math.inf, close: float = _CLOSE) -> tuple[float, float]:
        """Lower bounds of any plan on any of the meshes, within the memory limit and without one; infinite where the strategy cannot be had.
        Bounds further above ``enough_s`` or the lowest than ``close`` need not be tight, or further below where it is negative."""
        bounds = dict(self._bounds(meshes, enough_s, close))
        return min(bounds.values(), default=math.inf), self._free_s([meshes[k] for k in bounds])

    def is_hurt(self, meshes: Sequence[OnMesh], part: float) -> bool:
        """Whether memory makes plans on all of some meshes slower by more than a part: no bound is made any tighter than that takes."""
        free_s, before = 0.0, -math.inf
        while free_s > before:
            bounds = [self._bound_s(on, free_s * (1 + part) * _ROUNDED) for on in meshes]
            free_s, before = self._free_s([on for on, bound in zip(meshes, bounds, strict=True) if bound is not None]), free_s
        return min((b for b in bounds if b is not None), default=math.inf) > free_s * (1 + part)

    def _free_s(self, meshes: Sequence[OnMesh]) -> float:
        return min((max(on.floor_s, on.unlimited.bound_s) for on in meshes), default=math.inf)

    def _bounds(self, meshes: Sequence[OnMesh], enough_s: float = math.inf, close: float = _CLOSE) -> Iterator[tuple[int, float]]:
        """Index and bound of the meshes that the strategy can be had on; bounds further above ``enough_s`` or the lowest than
        ``close`` need not be tight. Meshes that are good as a rule come first until one shows what overlap and memory are worth, if they
        are worth anything; then all others are looked at roughly, and the one that promises most is looked at more closely."""
        enough, known = enough_s * (1 + max(close, 0.0)), False
        place = {id(on): k for k, on in enumerate(most_promising(meshes))}
        waiting = [(on.known_s, 0, place[id(on)], k) for k, on in enumerate(meshes)]
        while waiting:
            item = min(waiting) if known else min(waiting, key=lambda item: item[2])
            waiting.remove(item)
            (bound_s, looks, _, k), enough = item, min(enough, self.beat_s)
            if bound_s >= enough or looks == _LOOKS:
                yield k, bound_s
                continue
            is_first = not known
            found = self._bound_s(meshes[k], enough if looks else 0.0)
            if is_first and found is not None and (meshes[k].mesh.num_axes == 1 or meshes[k].is_limited(self.name)):
                looks, found = 1, self._bound_s(meshes[k], enough)
            if found is None:
                continue
            known = known or meshes[k].is_usual(self.name)
            enough = min(enough, found * (1 + close)) if looks and found < enough else enough
            if is_first and looks:
                yield k, found
            else:
                waiting.append((found, looks + 1, *item[2:]))

    def beat(self, found: Found) -> None:
        """Take a plan that was found otherwise."""
        assert self.best is not None
        if found.objective_s < self.best.objective_s:
            self.best = found
            if all(on is not found.on for on, _ in self.tried):  # a mesh that only named strategies were tried on
                self._say(found.on, "slower", None, found.outcome.step_time_s)

    def refine(self, meshes: Sequence[OnMesh]) -> None:
        """Try meshes on which not all rows are allowed: the most promising few. Only their compute bounds all plans on them."""
        open_ones = [on for on in meshes if on.floor_s < self.beat_s]
        for on in meshes:
            if on not in open_ones:
                self._say(on, "excluded", on.floor_s, reason="compute alone takes that long")
        promise = sorted((bound, k) for k, bound in self._bounds(open_ones, close=0.0))
        for rank, (bound, k) in enumerate(promise):
            on = open_ones[k]
            try:
                found = self._solve(on) if bound < self.beat_s and rank < _REFINED else None
            except NoPlanFoundError:
                found = None
            if isinstance(found, Found):
                self._say(on, "slower", None, found.outcome.step_time_s, reason=_FEW_ROWS)
                self.beat(found)
            else:
                self._say(on, "not better", reason=_FEW_ROWS if rank < _REFINED else "others promised more")

    @property
    def beat_s(self) -> float:
        """What a plan must cost less than to be of interest."""
        best_s = self.known_s if self.best is None else min(self.known_s, self.best.objective_s)
        return best_s * (1 - self.effort.gap)

    def _bound_s(self, on: OnMesh, enough: float) -> float | None:
        """A lower bound, not made any tighter than ``enough``; None where the strategy cannot be had on the mesh."""
        try:
            return on.bound_s(self.name, enough, self.effort)
        except InputError as e:
            self.refused = self.refused or e
            self._say(on, "impossible", reason=str(e))
            return None

    def _look_at(self, on: OnMesh, bound_s: float) -> None:
        """Solve on a mesh unless a bound settles it."""
        if bound_s == _NOTHING_FITS:
            self._say(on, "infeasible", reason="nothing fits")
            return
        if bound_s >= self.beat_s:
            what = "compute alone takes" if bound_s <= on.floor_s else "its relaxation takes"
            self._say(on, "excluded", bound_s, reason=f"{what} that long")
            return
        try:
            self._take(on, self._solve(on))
        except NoPlanFoundError:
            self._say(on, "not better", bound_s, reason="no plan was found within the effort, and none was excluded")

    @property
    def _rough(self) -> Effort:
        """The effort of a first look: nothing is split."""
        return replace(self.effort, columns=0)

    def polish(self) -> None:
        """Look for a better plan on the best mesh, if the bound there leaves room for one: with the whole effort."""
        assert self.best is not None
        found, on = self.best, self.best.on
        if self.effort == self._rough or found.objective_s - found.bound_s <= self.effort.gap * found.objective_s:
            return
        better = self._solve(on, self.effort)
        if isinstance(better, Found):
            self.best = better
        elif isinstance(better, Excluded):
            self.best = replace(found, bound_s=max(found.bound_s, better.bound_s))
        if not on.rows:
            bound_s = self.best.bound_s
            self.tried = [(other, replace(t, bound_s=bound_s) if other is on else t) for other, t in self.tried]

    def _solve(self, on: OnMesh, effort: Effort | None = None) -> Found | Excluded | None:
        """The best plan on a mesh that fits; None where none was found.

        The solver sees memory at few points: where a plan turns out larger than the limit, the point of its peak becomes one more,
        with what the solver even so does not see of the plan there; half of that where nothing fits then, as another plan may have less
        unseen. The bound stays that of all plans within the memory that the solver sees at first.
        """
        bound_s, on.points, at, before = math.inf, dict.fromkeys(self._points, 0), "", 0
        for _ in range(_TIGHTENINGS):
            found = on.solve(self.name, effort=effort or self._rough, beat_s=self.beat_s)
            if found is None and on.points.get(at, 0) > before + 1:
                on.points[at] = (before + on.points[at]) // 2
                continue
            if found is None or self.peak_of is None:
                return found
            bound_s = min(bound_s, found.bound_s)
            if isinstance(found, Excluded):
                return Excluded(bound_s)
            (peak, at), limit = self.peak_of(found), on.program.limit_bytes
            if peak <= limit:
                return replace(found, bound_s=bound_s)
            self._points[at] = None
            unseen, before = peak - on.seen_bytes(found, at), on.points.get(at, 0)
            on.points[at] = max(int(_SAFELY * unseen), on.points.get(at, -1) + 1, 0)
        return None

    def _take(self, on: OnMesh, found: Found | Excluded | None) -> None:
        if found is None and math.isfinite(self.beat_s):
            self._say(on, "not better", self.beat_s, reason="its plans that are faster do not fit")
        elif found is None:
            self._say(on, "infeasible", reason="nothing fits")
        elif isinstance(found, Excluded) and found.bound_s < self.beat_s:
            self._say(on, "not better", found.bound_s, reason="its plans that are faster do not fit")
        elif isinstance(found, Excluded):
            self._say(on, "excluded", found.bound_s, reason="its relaxation takes that long")
        else:
            self._say(on, "slower", found.bound_s, found.outcome.step_time_s)
            if self.best is None or found.objective_s < self.best.objective_s:
                self.best = found

    def _say(self, on: OnMesh, verdict: str, bound_s: float | None = None, step_s: float | None = None, reason: str = "") -> None:
        mesh, links = on.where.mesh, tuple(link.name for link in on.where.hardware.links)
        self.tried.append((on, MeshTried(mesh.sizes, mesh.names, links, verdict, bound_s, step_s, reason)))

    def bound_s(self) -> float:
        """Lower bound of any plan on any of the meshes that is faster than what was known."""
        return min((t.bound_s for _, t in self.tried if t.bound_s is not None), default=0.0)

    def free_bound_s(self) -> float:
        """Lower bound of any plan on any of the meshes if there were no memory limit."""
        return min((max(on.unlimited.bound_s, on.floor_s) for on, t in self.tried if t.verdict != "impossible"), default=math.inf)

    def on_infeasible(self) -> list[OnMesh]:
        return [on for on, t in self.tried if t.verdict == "infeasible"]


def most_promising(meshes: Sequence[OnMesh]) -> list[OnMesh]:
    """The meshes in the order in which they are good as a rule: one axis first, then axes of about equal sizes."""
    return sorted(meshes, key=lambda on: (on.mesh.num_axes > 1, max(on.mesh.sizes)))

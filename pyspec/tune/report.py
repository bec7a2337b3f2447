"""Everything that was measured about a pair, and what follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pyspec import bridge
from pyspec.costs import CostCurve
from pyspec.engine import AUTO, Gamma
from pyspec.llama import default_threads
from pyspec.tune.measure import Acceptance, Run, Setup, measure_costs, measure_runs, thread_counts
from pyspec.tune.predict import Costs, paper_speedup, speedup

# Speeds closer to each other than this are the same, as far as a short measurement can tell.
_NOISE = 0.02
# A measured speed-up further than this factor from the predicted one is not to be trusted.
_DOUBT = 1.3
# Width of the passes that are timed with other numbers of threads, besides 1: a usual draft length and one.
_USUAL_WIDTH = 5


@dataclass(frozen=True)
class ThreadCosts:
    """Seconds of passes with a number of threads."""

    threads: int
    target_one: float
    target_several: float  # a pass over _USUAL_WIDTH tokens
    draft: float


@dataclass(frozen=True)
class Speed:
    """What one draft length brought.

    Attributes:
        speedup: Tokens a second as a multiple of those without a draft.
    """

    gamma: Gamma
    tokens_per_round: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class FixedSpeed(Speed):
    """What one that does not change brought, and what was predicted.

    Attributes:
        predicted: The speed-up from the costs and the acceptance by position.
        paper: The same by the paper's formula.
    """

    gamma: int
    predicted: float
    paper: float


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes:
        costs: Of passes, with the threads that the texts were written with.
        by_threads: Of some passes, with other numbers of threads.
        runs: The texts by draft length; one is without drafts.
        kernels_lack: Why the kernels that make checking cheap are not in use; None if they are.
    """

    costs: Costs
    by_threads: tuple[ThreadCosts, ...]
    runs: tuple[Run, ...]
    kernels_lack: str | None

    @cached_property
    def acceptance(self) -> Acceptance:
        """Of all drafted tokens, whatever the draft length."""
        total = Acceptance()
        for run in self.runs:
            total.add(run.acceptance)
        return total

    @cached_property
    def speeds(self) -> tuple[FixedSpeed, ...]:
        """One for each fixed draft length."""
        return tuple(
            FixedSpeed(
                gamma=run.gamma,
                predicted=speedup(self.acceptance.by_position, run.gamma, self.costs),
                paper=paper_speedup(self.acceptance.rate, run.gamma, self.costs.c),
                **self._measured(run),
            )
            for run in self.runs
            if run.gamma != AUTO
        )

    @cached_property
    def auto(self) -> Speed:
        """What the engine's own choice brought."""
        run = next(run for run in self.runs if run.gamma == AUTO)
        return Speed(gamma=AUTO, **self._measured(run))

    def _measured(self, run: Run) -> dict[str, float]:
        plain = next(run for run in self.runs if run.gamma == 0)
        return {
            "tokens_per_round": run.tokens / run.rounds,
            "tokens_per_second": run.tokens_per_second,
            "speedup": run.tokens_per_second / plain.tokens_per_second,
        }

    @property
    def best(self) -> FixedSpeed:
        """The fastest fixed draft length, 0 excepted."""
        return max((s for s in self.speeds if s.gamma > 0), key=lambda speed: speed.speedup)

    @property
    def pays(self) -> bool:
        """Whether some draft length is faster than none by more than noise."""
        return self.best.speedup > 1 + _NOISE

    @property
    def conclusion(self) -> str:
        """Whether drafting pays, if not why, and what the default makes of it."""
        auto = self.auto
        return (
            f"{self._verdict()} With gamma auto, the default, it is {auto.speedup:.2f} times as fast, "
            f"{auto.tokens_per_second:.1f} tokens/s."
        )

    def _verdict(self) -> str:
        best, plain = self.best, next(s for s in self.speeds if s.gamma == 0)
        figures = (
            f"{best.tokens_per_second:.1f} tokens/s with gamma {best.gamma}, "
            f"{plain.tokens_per_second:.1f} without a draft"
        )
        doubt = ""
        if not 1 / _DOUBT < best.speedup / best.predicted < _DOUBT:
            doubt = (
                f" From the costs {best.predicted:.2f} times would follow: was the machine busy?"
            )
        if self.pays:
            return f"Drafting pays: {best.speedup:.2f} times as fast, {figures}.{doubt}"
        a, c, added = self.acceptance.by_position[0], self.costs.c, self.costs.added(1)
        why = (
            f"A drafted token adds {added:.2f} of a plain pass to a round, {c:.2f} to draw it and "
            f"{added - c:.2f} to check it, and is accepted {a:.2f} of the time"
        )
        if a <= c:
            why += ": the draft is too slow for how often it is right. Try a smaller one, or one closer to "
            why += "the target."
        elif a <= added:
            why += ": checking costs too much."
            if self.kernels_lack is not None:
                why += f" The kernels that make it cheap are not in use: {self.kernels_lack}."
        else:
            why += "."
        return f"Drafting does not pay: {best.speedup:.2f} times as fast, {figures}. {why}{doubt}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        acceptance = self.acceptance
        return {
            "pays": self.pays,
            "conclusion": self.conclusion,
            "best_gamma": self.best.gamma,
            "costs": {
                "target_ms": [1e3 * seconds for seconds in self.costs.target.seconds],
                "draft_ms": 1e3 * self.costs.draft,
                "c": self.costs.c,
            },
            "threads": [
                {
                    "threads": each.threads,
                    "target_ms": {
                        "1": 1e3 * each.target_one,
                        f"{_USUAL_WIDTH}": 1e3 * each.target_several,
                    },
                    "draft_ms": 1e3 * each.draft,
                }
                for each in self.by_threads
            ],
            "acceptance": {
                "a": acceptance.rate,
                "by_position": acceptance.by_position,
                "examined": acceptance.examined,
                "accepted": acceptance.accepted,
            },
            "gammas": [asdict(speed) for speed in self.speeds],
            "auto": asdict(self.auto),
        }


def tune(setup: Setup) -> Report:
    """Measure a pair.

    Raises:
        UsageError: A setting is outside its range, or the prompts yield no text.
        VocabularyMismatchError: The draft shares next to no tokens with the target.
        ModelError: A model cannot do what a measurement needs.
    """
    threads = setup.threads or default_threads()
    draft_threads = setup.draft_threads or threads
    counts = thread_counts(max(threads, default_threads()))
    total = len(counts) + 1
    setup.progress("costs", 0, total)
    costs = measure_costs(
        setup, range(1, max(setup.gammas) + 2), threads=threads, draft_threads=draft_threads
    )
    by_threads = []
    for done, count in enumerate(counts, start=1):
        setup.progress("costs", done, total)
        taken = measure_costs(setup, (1, _USUAL_WIDTH), threads=count, draft_threads=count)
        by_threads.append(ThreadCosts(count, taken[1], taken[_USUAL_WIDTH], taken[0]))
    setup.progress("costs", total, total)
    draft = costs.pop(0)
    kernels = bridge.attach_kernels()
    return Report(
        Costs(CostCurve(list(costs), list(costs.values())), draft),
        tuple(by_threads),
        tuple(measure_runs(setup)),
        None if kernels.instructions else kernels.reason,
    )

"""The statistics of a pool: what was best by validation, and how robust a method was.

A *group* is one task, model and privacy budget, with everything else the methods share (batch size,
epochs, ...): runs that differ in any of it are never averaged. A method's *pool* in a group is the
set of its configurations (learning rate, initial threshold, schedule); its *pool seeds* are the
seeds that ran all of them. If no seed did (a sweep under way), the one that ran most of them stands
in, and what it has not run counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from benchmarks.report_rows import Config, Run

CLASSES = {
    "cifar10": 10,
    "digits": 10,
    "fashionmnist": 10,
    "fmnist": 10,
    "imdb": 2,
    "mnist": 10,
    "names": 18,
}
WITHIN = 0.02  # "close to the best": two points of accuracy
_METHODS = (
    *("flat", "auto-s", "dc-sgd-e", "adaptive", "slaclip", "slaclip-q", "slaclip-unit"),
    *("slaclip-q-unit", "slaclip-auto", "slaclip-q-auto"),
)
# Methods that take no C_0: one threshold of the pool stands for all.
_WITHOUT_START = ("slaclip-auto", "slaclip-q-auto", "slaclip-q10-auto", "slaclip-trade-off")
_ROUNDING = 1e-9  # means of equal accuracies may differ in their last bits


@dataclass(frozen=True)
class Pool:
    """All runs of one method in one group."""

    method: str
    runs: Mapping[tuple[Config, int], Run]
    classes: int | None

    @cached_property
    def configs(self) -> list[Config]:
        """The configurations that were tried, sorted."""
        return sorted({config for config, _ in self.runs})

    @property
    def has_start(self) -> bool:
        """Whether the method takes an initial threshold."""
        return self.method not in _WITHOUT_START

    def start(self, config: Config | None) -> float | None:
        """Return a configuration's initial threshold, None if there is none."""
        return config.clip_norm if config is not None and self.has_start else None

    @cached_property
    def seeds(self) -> list[int]:
        """The pool seeds: those that tried every configuration, else the one that tried most."""
        seeds = sorted({seed for _, seed in self.runs})
        tried = {seed: sum((c, seed) in self.runs for c in self.configs) for seed in seeds}
        full = [seed for seed in seeds if tried[seed] == len(self.configs)]
        return full or [max(seeds, key=lambda seed: tried[seed])]

    @cached_property
    def chance(self) -> float:
        """The accuracy of guessing evenly; 0 if the task's number of classes is unknown."""
        return 1.0 / self.classes if self.classes else 0.0

    @cached_property
    def floor(self) -> float:
        """The accuracy below which a run has collapsed.

        Twice chance; with fewer than ten classes chance plus ten points, as twice chance would be
        100 % with two.
        """
        return min(2.0 * self.chance, self.chance + 0.1) if self.classes else 0.0

    def pool_runs(self, config: Config) -> list[Run]:
        """Return the runs of a configuration on the pool seeds, failed ones included."""
        return [self.runs[config, seed] for seed in self.seeds if (config, seed) in self.runs]

    def finished_runs(self, config: Config) -> list[Run]:
        """Return the runs of a configuration on all seeds that finished, by seed."""
        runs = [run for (key, _), run in self.runs.items() if key == config and not run.failed]
        return sorted(runs, key=lambda run: run.seed)

    @cached_property
    def errors(self) -> list[Config]:
        """The configurations that failed on a pool seed; they have no mean."""
        return [c for c in self.configs if any(run.failed for run in self.pool_runs(c))]

    def mean(self, part: str, config: Config) -> float | None:
        """Return the mean accuracy over the pool seeds; None if one failed or has not run."""
        runs = self.pool_runs(config)
        if len(runs) < len(self.seeds) or any(run.failed for run in runs):
            return None
        return fmean(run.accuracy(part, self.chance) for run in runs)

    def means(self, part: str) -> dict[Config, float]:
        """Return the mean accuracies of the configurations that have one."""
        found = {config: self.mean(part, config) for config in self.configs}
        return {config: mean for config, mean in found.items() if mean is not None}

    @cached_property
    def best(self) -> Config | None:
        """The configuration of the highest mean validation accuracy over the pool seeds.

        Test accuracy is never looked at. Ties go to the smaller learning rate, then threshold.
        """
        means = self.means("validation")
        if not means:
            return None
        highest = max(means.values())
        return min(config for config in means if means[config] >= highest - _ROUNDING)

    def test_accuracies(self, config: Config) -> list[float]:
        """Return the test accuracies of all seeds that finished, by seed."""
        return [run.accuracy("test", self.chance) for run in self.finished_runs(config)]

    @cached_property
    def collapsed(self) -> list[Config]:
        """The configurations that collapsed (below the floor, or diverged) on a pool seed."""
        return [
            config for config in self.configs if any(map(self._collapsed, self.pool_runs(config)))
        ]

    def _collapsed(self, run: Run) -> bool:
        if run.failed:
            return False
        return run.diverged or run.accuracy("test", 0.0) < self.floor

    def num_within(self, best: float) -> int:
        """Return how many configurations have a mean test accuracy within two points of it."""
        return sum(mean >= best - WITHIN - _ROUNDING for mean in self.means("test").values())


@dataclass(frozen=True)
class Group:
    """The pools of all methods under one set of shared settings."""

    settings: Mapping[str, Any]
    pools: Mapping[str, Pool]
    name: str  # for file names

    @property
    def title(self) -> str:
        """The task, model and budget, for headings and figures."""
        return "{task}, {model}, ε = {epsilon:g}".format(**self.settings)

    @cached_property
    def configs(self) -> list[Config]:
        """The union of the pools, sorted; of those with C_0 if there are any.

        What a method without C_0 ran at other learning rates is beside the pool.
        """
        pools = [pool for pool in self.pools.values() if pool.has_start]
        return sorted({c for pool in pools or self.pools.values() for c in pool.configs})

    def expected_size(self, pool: Pool) -> int:
        """Return how many configurations a method's pool has when it is complete."""
        if pool.has_start:
            return len(self.configs)
        return len({(config.learning_rate, config.schedule) for config in self.configs})

    @cached_property
    def best_test(self) -> float | None:
        """The highest mean test accuracy in any pool: describes the pools, selects nothing."""
        means = [mean for pool in self.pools.values() for mean in pool.means("test").values()]
        return max(means, default=None)


def group(runs: Iterable[Run]) -> list[Group]:
    """Group runs by shared settings; groups are sorted by task, model and budget."""
    found: dict[tuple[tuple[str, Any], ...], dict[str, dict[tuple[Config, int], Run]]] = {}
    for run in runs:
        methods = found.setdefault(run.settings, {})
        methods.setdefault(run.method, {})[run.config, run.seed] = run
    groups: list[Group] = []
    names: dict[str, int] = {}
    for key in sorted(found, key=_sort_key):
        settings = dict(key)
        classes = CLASSES.get(_plain(settings["task"]).replace("-", ""))
        pools = {m: Pool(m, found[key][m], classes) for m in sorted(found[key], key=_rank)}
        name = _plain("{task}-{model}-eps{epsilon:g}".format(**settings))
        names[name] = names.get(name, 0) + 1
        suffix = f"-{names[name]}" if names[name] > 1 else ""
        groups.append(Group(settings, pools, name + suffix))
    return groups


def _sort_key(settings: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    values = dict(settings)
    rest = json.dumps(values, sort_keys=True, default=str)
    return values["task"], values["model"], float(values["epsilon"]), rest


def _rank(method: str) -> tuple[int, str]:
    return (_METHODS.index(method) if method in _METHODS else len(_METHODS)), method


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name.lower())

"""Tables of a group of runs as records, and as markdown and CSV.

Records hold plain values (accuracies as fractions); rounding happens only in the markdown.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance
from typing import Any

from benchmarks.report_pools import WITHIN, Group, Pool

BEST_NOTE = (
    "Per method the configuration with the highest mean *validation* accuracy over the pool's "
    "seeds; the test set has no part in the choice. Test accuracy: mean ± sample standard "
    "deviation over the n seeds that finished there, those that it was chosen with included. "
    "Arrows: the lowest or highest learning rate of the pool, so another might do better. Bold: "
    "the highest mean of those with the most seeds."
)
_BEST_HEAD = (
    "method | learning rate | C_0 | schedule | validation, % | test, % | n | pool | pool's seeds"
)
_ROBUST_HEAD = (
    "method | mean, % | within 2 points of its best | of the best of all | collapsed | errors | "
    "pool | seeds"
)
TRANSLATED_NOTE = (
    "Methods that need no C_0 (AUTO-S's own only multiplies its learning rate) at the one rate "
    "that flat's best cell by validation gives, its learning rate times its C, and at its "
    "schedule: the difference in points from the best cell by validation of each method's whole "
    "pool. ± is the standard error of the difference by the seeds of both (n each). Weight decay, "
    "where there is some, is not translated."
)
_STUCK = {
    "names": " Predicting the most frequent class (9,384 of 20,050 names are Russian) scores 47 %, "
    "so a run can be stuck well above that line."
}


def best_of_pool(group: Group) -> list[dict[str, Any]]:
    """Return a record a method: its best configuration by validation, and the accuracies there.

    ``test_std`` is the sample standard deviation, None with one seed; everything about the choice
    is None where no configuration has finished on the pool seeds.
    """
    return [_best(group, pool) for pool in group.pools.values()]


def _best(group: Group, pool: Pool) -> dict[str, Any]:
    best = pool.best
    tests = pool.test_accuracies(best) if best else []
    rates = sorted({config.learning_rate for config in pool.configs})
    edges = {rates[0]: " ↓", rates[-1]: " ↑"} if len(rates) > 1 else {}
    return {
        "method": pool.method,
        "learning_rate": best.learning_rate if best else None,
        "edge": edges.get(best.learning_rate, "") if best else "",
        "clip_norm": pool.start(best),
        "schedule": best.schedule if best else None,
        "validation_mean": pool.mean("validation", best) if best else None,
        "test_mean": fmean(tests) if tests else None,
        "test_std": stdev(tests) if len(tests) > 1 else None,
        "num_seeds": len(tests),
        "pool_size": len(pool.configs),
        "pool_expected": group.expected_size(pool),
        "pool_seeds": " ".join(map(str, pool.seeds)),
    }


def robustness(group: Group) -> list[dict[str, Any]]:
    """Return a record a method: how much of its pool is good, on the pool seeds.

    Shares are of the whole pool, so that an error counts against a method; the mean is over the
    configurations that finished.
    """
    return [_robustness(group, pool) for pool in group.pools.values()]


def _robustness(group: Group, pool: Pool) -> dict[str, Any]:
    means = pool.means("test").values()
    size = len(pool.configs)
    own = pool.num_within(max(means)) if means else 0
    overall = pool.num_within(group.best_test) if group.best_test is not None else 0
    return {
        "method": pool.method,
        "test_mean": fmean(means) if means else None,
        "num_within_own_best": own,
        "share_within_own_best": own / size,
        "num_within_overall_best": overall,
        "share_within_overall_best": overall / size,
        "num_collapsed": len(pool.collapsed),
        "num_errors": len(pool.errors),
        "num_finished": len(means),
        "pool_size": size,
        "pool_expected": group.expected_size(pool),
        "pool_seeds": " ".join(map(str, pool.seeds)),
    }


def translated(group: Group) -> list[dict[str, Any]]:
    """Compare methods that need no C_0 at one learning rate with the best of every pool.

    The rate is ``learning rate x C`` of flat's best cell by validation, at its schedule: what a
    step of unit length multiplies at a constant threshold. AUTO-S needs no C_0 either: its own
    only multiplies its learning rate.

    Returns:
        A record for each pair of a method that needs no C_0 and ran there, and a method with one:
        ``difference`` of the mean test accuracies, and ``difference_std``, its standard error by
        the seeds of both, None where one of them has a single seed.
    """
    flat = group.pools.get("flat")
    if flat is None or flat.best is None:
        return []
    rate, schedule = flat.best.learning_rate * flat.best.clip_norm, flat.best.schedule
    records = []
    for free in group.pools.values():
        if free.has_start and free.method != "auto-s":
            continue
        found = {
            config: free.test_accuracies(config)
            for config in free.configs
            if config.schedule == schedule
            and math.isclose(config.learning_rate * (free.start(config) or 1.0), rate)
        }
        chosen = max(found, key=lambda config: len(found[config]), default=None)
        ours = found[chosen] if chosen else []
        for rival in (pool for pool in group.pools.values() if ours and pool.has_start):
            if rival is free and rival.best == chosen:
                continue  # the same runs
            theirs = rival.test_accuracies(rival.best) if rival.best else []
            if theirs:
                pair = _difference(free.method, rate, ours, rival.method, theirs)
                records.append(pair | {"schedule": schedule})
    return records


def _difference(
    method: str, rate: float, ours: list[float], rival: str, theirs: list[float]
) -> dict[str, Any]:
    has_std = min(len(ours), len(theirs)) > 1
    variances = [variance(values) / len(values) for values in (ours, theirs)] if has_std else []
    return {
        "method": method,
        "learning_rate": rate,
        "test_mean": fmean(ours),
        "num_seeds": len(ours),
        "rival": rival,
        "rival_test_mean": fmean(theirs),
        "rival_num_seeds": len(theirs),
        "difference": fmean(ours) - fmean(theirs),
        "difference_std": math.sqrt(sum(variances)) if has_std else None,
    }


def translated_markdown(group: Group) -> str:
    """Return the table of :func:`translated`, empty if there is nothing to compare."""
    records = translated(group)
    if not records:
        return ""
    free = {each["method"]: each for each in records}
    shown: dict[str, dict[str, str]] = {}
    for each in records:
        rival = f"{each['rival']} | {_percent(each['rival_test_mean'])} ({each['rival_num_seeds']})"
        noise = each["difference_std"]
        spread = "" if noise is None else f" ± {_percent(noise)}"
        shown.setdefault(rival, {})[each["method"]] = f"{100 * each['difference']:+.2f}{spread}"
    rate, schedule = _number(records[0]["learning_rate"]), records[0]["schedule"]
    head = [f"at rate {rate}, {schedule}, against the best of", "test, % (n)"]
    head += [f"{m}, {_percent(r['test_mean'])} ({r['num_seeds']})" for m, r in free.items()]
    rows = [[rival, *(found.get(m, "") for m in free)] for rival, found in shown.items()]
    return _markdown(" | ".join(head), rows)


def pool_cells(group: Group) -> list[dict[str, Any]]:
    """Return a record a configuration and method: what the heatmaps show."""
    return [
        {
            "method": pool.method,
            "learning_rate": config.learning_rate,
            "clip_norm": pool.start(config),
            "schedule": config.schedule,
            "validation_mean": pool.mean("validation", config),
            "test_mean": pool.mean("test", config),
            "pool_seeds": " ".join(map(str, pool.seeds)),
            "num_seeds_finished": len(pool.test_accuracies(config)),
            "best_by_validation": config == pool.best,
            "collapsed": config in pool.collapsed,
            "error": config in pool.errors,
        }
        for pool in group.pools.values()
        for config in pool.configs
    ]


def best_markdown(group: Group) -> str:
    """Return the table of the best of each pool."""
    records = best_of_pool(group)
    most = max(1, *(record["num_seeds"] for record in records))
    top = max((r["test_mean"] for r in records if r["num_seeds"] == most), default=None)
    rows = []
    for record in records:
        test = _percent(record["test_mean"])
        if record["test_std"] is not None:
            test += f" ± {_percent(record['test_std'])}"
        bold = "**" if (record["test_mean"], record["num_seeds"]) == (top, most) else ""
        rows.append(
            [
                record["method"],
                _number(record["learning_rate"]) + record["edge"],
                _number(record["clip_norm"]),
                record["schedule"] or "–",
                _percent(record["validation_mean"]),
                f"{bold}{test}{bold}",
                str(record["num_seeds"]),
                _pool_size(record),
                _seeds(record),
            ]
        )
    return _markdown(_BEST_HEAD, rows)


def robustness_markdown(group: Group) -> str:
    """Return the table of robustness over the pools."""
    rows = [
        [
            record["method"],
            _percent(record["test_mean"]),
            _share(record["num_within_own_best"], record["pool_size"]),
            _share(record["num_within_overall_best"], record["pool_size"]),
            str(record["num_collapsed"]),
            str(record["num_errors"]),
            _pool_size(record),
            _seeds(record),
        ]
        for record in robustness(group)
    ]
    return _markdown(_ROBUST_HEAD, rows)


def robustness_note(group: Group) -> str:
    """Return the rules of the robustness table, with the group's numbers in them."""
    pool = next(iter(group.pools.values()))
    if pool.classes:
        rule = (
            f"its test accuracy is below {_percent(pool.floor, 1)} % (twice the chance level of "
            f"{pool.classes} classes; with fewer than ten, chance plus ten points) or it diverged"
        )
    else:
        rule = "it diverged (the task's number of classes is not known here, so no chance level)"
    stuck = _STUCK.get(str(group.settings["task"]), "")
    return (
        "Test accuracy over each method's pool of (learning rate, C_0, schedule), averaged over "
        "the pool's seeds first. Within: mean test accuracy at most "
        f"{100 * WITHIN:g} points below the highest of the same pool, and of all pools. A "
        f"configuration has collapsed if on any of these seeds {rule}. Errors are configurations "
        "that raised: they have no accuracy, so they are not in the mean and not among the "
        f"collapsed, but they are part of the pool that the shares refer to.{stuck}"
    )


def to_csv(groups: Iterable[Group], records: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return all groups' records as one CSV, the shared settings in front."""
    rows = [
        {**group.settings, **record}
        for group, found in zip(groups, records, strict=True)
        for record in found
    ]
    out = io.StringIO()
    fields = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, fields, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    names = head.split(" | ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({100 * count / total:.0f} %)"


def _pool_size(record: dict[str, Any]) -> str:
    size, expected = record["pool_size"], record["pool_expected"]
    return str(size) if size == expected else f"{size} of {expected}"


def _seeds(record: dict[str, Any]) -> str:
    return record["pool_seeds"].replace(" ", ", ")

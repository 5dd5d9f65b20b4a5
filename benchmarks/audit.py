"""Claim: a step of SlaClip shows no sample more than plain DP-SGD with the same noise does.

Two data sets differ in one canary. The whole step is run many thousand times on each, through the
real optimizer, and two attacks (the likelihood ratio of the claimed mechanism, and one fitted on a
held-out half of the draws) try to tell them apart. Their success is a lower bound on mu of Gaussian
DP (for the composed run: on epsilon). The audit fails if a bound exceeds the claim, if a canary is
not as visible as theory says it is, or if it was too weak to show either.

    python -m benchmarks.audit
    python -m benchmarks.audit --families hooks ghost --draws 6000
    python -m benchmarks.audit --short

Each finished cell is appended to ``--output`` at once, and cells that are there are not run again.
All bounds together fail with probability 1e-6, but those marked 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import audit_composed
from benchmarks.audit_attacks import Finding, expected_mu, run_attacks, verdict
from benchmarks.audit_ranks import releases
from benchmarks.audit_releases import FAMILIES, FAR, NUM_SLOTS
from benchmarks.cells import stamp
from benchmarks.rows import RowFile

# Gradient norm of the canary, in thresholds.
CANARIES = {
    "0": 0.0,
    "C/K": 1 / NUM_SLOTS,
    "in a bin": 1.5 / NUM_SLOTS,
    "C/2": 0.5,
    "just under C": 0.999,
    "C": 1.0,
    "far above C": FAR,
}
# Where the threshold has moved, only these norms are the same number of thresholds in each step.
LASTING = ("0", "far above C")
ATTACKS = ("claimed", "fitted")
COMPOSED = "composed"

CONFIGURATIONS = [
    (family, canary)
    for family in (*FAMILIES, COMPOSED)
    for canary in (LASTING if family in ("two-steps", COMPOSED) else CANARIES)
]
SHORT = [
    ("hooks", "0"),
    ("hooks", "in a bin"),
    ("ghost", "far above C"),
    ("virtual", "far above C"),
    ("two-steps", "0"),
    ("ddp", "0"),
]
ERROR_BUDGET = 1e-6
ERROR_PER_CELL = ERROR_BUDGET / (len(CONFIGURATIONS) * len(ATTACKS))
POWER = 0.9  # the share of the claim that the strongest canary has to prove, at 95 %

Cell = dict[str, Any]


def run_cells(family: str, canary: str, args: argparse.Namespace) -> list[Cell]:
    """Draw releases for one canary, and return a cell for each attack on them."""
    start = time.perf_counter()
    seed = 1000 * args.seed + CONFIGURATIONS.index((family, canary))
    norm, sigma = CANARIES[canary], args.sigma
    findings: dict[str, Any]
    if family == COMPOSED:
        findings = audit_composed.run_composed(
            norm, sigma=sigma, num_draws=args.draws // 2, seed=seed, error=ERROR_PER_CELL
        )
    else:
        sides = releases(FAMILIES[family], norm, sigma=sigma, num_draws=args.draws, seed=seed)
        findings = run_attacks(FAMILIES[family], norm, sigma, sides, ERROR_PER_CELL)
    return [
        _key(family, canary, attack, args) | _judged(family, norm, sigma, finding) | stamp(start)
        for attack, finding in findings.items()
    ]


def _key(family: str, canary: str, attack: str, args: argparse.Namespace) -> Cell:
    return {
        "family": family,
        "canary": canary,
        "attack": attack,
        "sigma": args.sigma,
        "draws": args.draws,
        "seed": args.seed,
    }


def _judged(family: str, norm: float, sigma: float, finding: Any) -> Cell:
    if isinstance(finding, Finding):
        num_steps = FAMILIES[family].num_steps
        expected, limit = expected_mu(norm, sigma, num_steps), math.sqrt(num_steps) / sigma
        claim = {"expected": expected, "limit": limit}
        return asdict(finding) | claim | {"verdict": verdict(finding, expected, limit)}
    accounted = audit_composed.accounted(sigma)
    bounds = finding.epsilon_lower_bound.items()
    leaks = any(bound > accounted["prv"][delta] for delta, bound in bounds)
    converted = audit_composed.epsilon_of_mu(finding.mu_lower_bound_95, audit_composed.QUOTED_DELTA)
    # Through JSON and back, keys are text.
    found: Cell = json.loads(json.dumps(asdict(finding) | accounted))
    return found | {"epsilon_by_mu": converted, "verdict": "LEAK" if leaks else "ok"}


def powers(cells: list[Cell]) -> dict[str, float]:
    """Return, by family, the largest mu that was proven at 95 %, as a share of the claim."""
    shares: dict[str, float] = {}
    for cell in cells:
        if cell["family"] != COMPOSED:
            share = cell["mu_lower_bound_95"] / cell["limit"]
            shares[cell["family"]] = max(share, shares.get(cell["family"], 0.0))
    return shares


def table(cells: list[Cell]) -> str:
    """Return the cells of single releases as a Markdown table."""
    lines = [
        "| family | canary's norm | attack | mu at 95 % | mu | between | expected | limit | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        if c["family"] != COMPOSED:
            lines.append(
                f"| {c['family']} | {c['canary']} | {c['attack']} "
                f"| >= {c['mu_lower_bound_95']:.3f} | >= {c['mu_lower_bound']:.3f} "
                f"| {c['low']:.3f} and {c['high']:.3f} | {c['expected']:.3f} | {c['limit']:.3f} "
                f"| {c['verdict']} |"
            )
    return "\n".join(lines)


def composed_table(cells: list[Cell]) -> str:
    """Return the cells of the composed run as a Markdown table, with what bounds them."""
    lines = [
        "| canary's norm | attack | delta | epsilon at 95 % | epsilon | prv | rdp | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        if c["family"] == COMPOSED:
            lines += [
                f"| {c['canary']} | {c['attack']} | {delta} | >= {at_95:.2f} "
                f"| >= {c['epsilon_lower_bound'][delta]:.2f} | {c['prv'][delta]:.2f} "
                f"| {c['rdp'][delta]:.2f} | {c['verdict']} |"
                for delta, at_95 in c["epsilon_lower_bound_95"].items()
            ]
    for c in cells:
        if c["family"] == COMPOSED and c["attack"] == "claimed":
            delta = str(audit_composed.QUOTED_DELTA)
            lines.append(
                f"\nCanary's norm {c['canary']}: at delta = {delta} simulation has no power. As a "
                f"conversion only, mu >= {c['mu_lower_bound_95']:.2f} (at 95 %) would be epsilon "
                f">= {c['epsilon_by_mu']:.2f}, were the run Gaussian DP; prv says "
                f"{c['prv'][delta]:.2f}, rdp {c['rdp'][delta]:.2f}."
            )
    return "\n".join(lines)


def report(cells: list[Cell]) -> str:
    """Return everything there is to say, in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in cells[0]["versions"].items())
    size = f"sigma = {cells[0]['sigma']:g}, {cells[0]['draws']} draws a side"
    parts = [f"{size}, seed {cells[0]['seed']}; {versions}", table(cells)]
    if any(cell["family"] == COMPOSED for cell in cells):
        parts.append(composed_table(cells))
    shares = ", ".join(f"{family} {share:.2f}" for family, share in powers(cells).items())
    parts.append(f"Power, as the proven share of the claim at 95 % (at least {POWER}): {shares}.")
    failed = [c for c in cells if c["verdict"] != "ok"]
    weak = [family for family, share in powers(cells).items() if share < POWER]
    parts.append(
        f"{len(cells)} cells, {len(failed)} failed; too weak: {', '.join(weak) or 'none'}."
    )
    return "\n\n".join(parts)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    families = (*FAMILIES, COMPOSED)
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--draws", type=int, help="a side; half as many composed runs")
    parser.add_argument("--sigma", type=float, help="noise multiplier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON lines")
    # Relative to mu, draws are worth most at mu = 3.
    parser.add_argument("--short", action="store_true", help="a few canaries, at sigma = 1/3")
    args = parser.parse_args(argv)
    args.draws = args.draws or (2000 if args.short else 12_000)
    args.sigma = args.sigma or (1 / 3 if args.short else 1.0)
    args.output = args.output or Path(
        "outputs/audit_short.jsonl" if args.short else "outputs/audit.jsonl"
    )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run what is missing in the output file, print the report, return 1 if the audit failed."""
    args = parse(argv)
    torch.set_num_threads(1)
    file = RowFile(args.output, lambda row: row["family"])
    done = file.read()
    wanted = [c for c in (SHORT if args.short else CONFIGURATIONS) if c[0] in args.families]
    cells = []
    for family, canary in tqdm(wanted):
        keys = [_key(family, canary, attack, args) for attack in ATTACKS]
        found = [cell for key in keys for cell in done if key.items() <= cell.items()]
        if len(found) < len(keys):
            known, found = found, run_cells(family, canary, args)
            for cell in found[len(known) :]:  # a killed run kept the first of them
                file.append(cell)
        cells += found
    print(report(cells))
    failed = any(cell["verdict"] != "ok" for cell in cells)
    return int(failed or any(share < POWER for share in powers(cells).values()))


if __name__ == "__main__":
    # torch says so of every first layer, whose input is data and needs no gradient.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    sys.exit(main())

#!/usr/bin/env python3
"""Make the animation of the README, docs/images/slaclip.gif, from a real run.

The demo's network is trained on scikit-learn's digits, from a threshold that is far too small. Each
frame is one step: the gradient norms of its batch, the slack indicator that it released, and where
the threshold, test accuracy and epsilon stand. The norms, and the marks of the indicator without
noise, are private: they are drawn because this data set is public, and nothing else reads them.

The same versions of the packages give the same bytes.
"""
# ruff: noqa: T201 - a script that talks to a person

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from opacus_slaclip import PrivacyEngine, SlackIndicator
from opacus_slaclip.demo.data import load
from opacus_slaclip.demo.training import accuracy, build_model
from opacus_slaclip.optimizers.grad_sample import per_sample_norms
from opacus_slaclip.slack import normalize_slack, sum_slack

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "slaclip.gif"

# The run: the demo's settings but for C_0.
INITIAL_CLIP_NORM, EPSILON, DELTA = 0.1, 3.0, 1e-4
EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED = 20, 128, 0.2, 0

STRIDE = 3  # every so many-th step is a frame
FRAME_MS, LAST_MS = 120, 2500

# Okabe and Ito's palette, distinct to color-blind readers.
BLUE, SKY, ORANGE, GREEN, RED = "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"
DARK, GREY = "#222222", "#767676"
RC: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "text.color": DARK,
    "axes.labelcolor": DARK,
}
SHADES = 9  # of each color on white, for smooth edges
NORM_RANGE = (0.01, 50.0)  # of the axis of gradient norms; what lies outside is drawn at its ends
GOLDEN = 0.6180339887  # its multiples fill the unit interval evenly: heights of the dots


@dataclass(frozen=True)
class Step:
    """What one frame shows.

    Attributes:
        norms: Gradient norms of the batch. Private.
        slots: The indicator as it would be without noise. Private.
        indicator: What was released.
        next_clip_norm: The threshold of the next step.
        test_accuracy: In percent.
        epsilon: Spent so far.
    """

    norms: NDArray[np.float64]
    slots: NDArray[np.float64]
    indicator: SlackIndicator
    next_clip_norm: float
    test_accuracy: float
    epsilon: float


def train() -> list[Step]:
    """Train once and return every step."""
    split = load("digits")
    weights, batches, noise = np.random.SeedSequence(SEED).generate_state(3).tolist()
    torch.manual_seed(weights)
    model = build_model(split.train.tensors[0].shape[1:], split.num_classes)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(
            split.train,
            batch_size=BATCH_SIZE,
            generator=torch.Generator().manual_seed(batches),
        ),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=INITIAL_CLIP_NORM,
        clipping="slaclip",
        noise_generator=torch.Generator().manual_seed(noise),
    )
    criterion = nn.CrossEntropyLoss()
    steps = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            model.train()
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            norms = per_sample_norms(optimizer.grad_samples)
            optimizer.step()
            indicator = optimizer.slack_indicator
            sums = sum_slack(norms, clip_norm=indicator.clip_norm, num_slots=indicator.num_slots)
            slots = normalize_slack(sums, expected_batch_size=indicator.expected_batch_size)
            steps.append(
                Step(
                    norms=norms.double().numpy(),
                    slots=slots.double().numpy(),
                    indicator=indicator,
                    next_clip_norm=optimizer.max_grad_norm,
                    test_accuracy=100 * accuracy(model, split.test),
                    epsilon=engine.get_epsilon(DELTA),
                )
            )
    return steps


def shown(count: int) -> list[int]:
    """Return which steps of a run are frames: the first, and every third up to the last."""
    return sorted({0, *range(count - 1, 0, -STRIDE)})


def draw(steps: Sequence[Step], last: int) -> Image.Image:
    """Draw ``steps[last]`` and what led to it; every frame has the same axes."""
    step = steps[last]
    with rc_context(RC):
        figure = Figure(figsize=(8.0, 4.8), dpi=100, facecolor="white")
        upper = figure.add_gridspec(1, 1, left=0.03, right=0.97, top=0.79, bottom=0.565)
        lower = figure.add_gridspec(
            1, 3, left=0.075, right=0.97, top=0.395, bottom=0.135, wspace=0.36,
            width_ratios=(1.25, 1, 1),
        )  # fmt: skip
        title = f"One private run, started at a threshold of C = {INITIAL_CLIP_NORM:g}"
        figure.text(0.03, 0.945, title, fontsize=13, fontweight="bold")
        figure.text(0.97, 0.945, f"step {last + 1} of {len(steps)}", fontsize=12, ha="right")
        handles = [Patch(color=SKY, label="kept as it is"), Patch(color=ORANGE, label="clipped")]
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.022, 0.935),
            ncols=2,
            frameon=False,
            handlelength=0.9,
            handleheight=0.9,
            columnspacing=1.2,
        )
        draw_norms(figure.add_subplot(upper[0]), step)
        draw_slots(figure.add_subplot(lower[0]), step)
        draw_rise(
            figure.add_subplot(lower[1]),
            [one.test_accuracy for one in steps],
            last,
            top=100,
            color=GREEN,
            title="test accuracy {:.0f} %",
        )
        draw_rise(
            figure.add_subplot(lower[2]),
            [one.epsilon for one in steps],
            last,
            top=EPSILON,
            color=RED,
            title="epsilon {:.2f}",
        )
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")


def draw_norms(axes: Axes, step: Step) -> None:
    """Draw the gradient norm of every sample, and the threshold on the same axis."""
    clip_norm = step.indicator.clip_norm
    norms = step.norms.clip(*NORM_RANGE)
    heights = (np.arange(len(norms)) * GOLDEN) % 1.0
    colors = np.where(norms <= clip_norm, SKY, ORANGE)
    axes.scatter(norms, heights, s=22, c=colors, linewidths=0)
    axes.axvline(clip_norm, ymin=-0.02, color=BLUE, linewidth=2.5, clip_on=False)
    axes.text(
        clip_norm,
        1.04,
        f"C = {clip_norm:.2f}",
        transform=axes.get_xaxis_transform(),
        color=BLUE,
        fontsize=11,
        fontweight="bold",
        ha="center",
        va="bottom",
    )
    axes.set_xscale("log")
    axes.set_xlim(*NORM_RANGE)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(FixedLocator([0.01, 0.1, 1, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
        "gradient norm of each sample of the batch (private: drawn for this picture only)"
    )


def draw_slots(axes: Axes, step: Step) -> None:
    """Draw the released indicator as slots that are filled, over the norms from 0 to C."""
    count = step.indicator.num_slots
    middles = (np.arange(count) + 0.5) / count
    released = step.indicator.values.numpy()[::-1]
    axes.bar(middles, 1.0, width=0.86 / count, color="white", edgecolor=GREY, linewidth=1.0)
    axes.bar(middles, released, width=0.86 / count, color=BLUE)
    axes.hlines(
        step.slots[::-1], middles - 0.43 / count, middles + 0.43 / count, color=DARK, linewidth=1.5
    )
    axes.axhline(0.0, color=GREY, linewidth=1.0)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xticks([0, 1], ["0", "C"])
    axes.set_xlabel(
        f"gradient norm, in {count} slots\n(black: without noise, private)", labelpad=-8
    )
    axes.set_title("slots: released share below")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def draw_rise(
    axes: Axes, values: Sequence[float], last: int, *, top: float, color: str, title: str
) -> None:
    """Draw a number over the steps taken so far."""
    steps = np.arange(1, len(values) + 1)
    axes.plot(steps[: last + 1], values[: last + 1], color=color, linewidth=2.0)
    axes.plot(steps[last], values[last], "o", color=color, markersize=6, clip_on=False)
    axes.set_xlim(0, len(values))
    axes.set_ylim(0, top)
    axes.set_xticks([0, len(values)])
    axes.set_yticks([0, top])
    axes.set_xlabel("step", labelpad=-8)
    axes.set_title(title.format(values[last]))


def shades() -> NDArray[np.uint8]:
    """Return every color that is used, from white on in steps, shape (n, 3)."""
    colors = np.array([to_rgb(color) for color in (BLUE, SKY, ORANGE, GREEN, RED, DARK, GREY)])
    shares = np.linspace(0.0, 1.0, SHADES)[1:, None, None]
    mixed = (1.0 - shares * (1.0 - colors)).reshape(-1, 3)
    return np.rint(255 * np.vstack([np.ones((1, 3)), mixed])).astype(np.uint8)


def write(frames: Sequence[Image.Image], path: Path) -> None:
    """Write one looping GIF in one palette: one for each frame would flicker."""
    palette = Image.new("P", (1, 1))
    palette.putpalette(shades().flatten().tolist())
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    flat[0].save(
        path,
        save_all=True,
        append_images=flat[1:],
        duration=[FRAME_MS] * (len(flat) - 1) + [LAST_MS],
        loop=0,
        optimize=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=TARGET, help="the GIF to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more would change the rounding of sums
    with warnings.catch_warnings():
        for start in ("Secure RNG turned off", "Full backward hook", "Optimal order is the"):
            warnings.filterwarnings("ignore", message=start)
        steps = train()
    frames = [draw(steps, last) for last in shown(len(steps))]
    write(frames, options.output)
    size = options.output.stat().st_size
    print(f"{options.output.name}: {len(frames)} frames, {frames[0].size}, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

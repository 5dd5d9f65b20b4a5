"""Our entries in a checkpoint: plain numbers in every param group.

Keys inside ``param_groups`` are what survives ``state_dict``, Opacus's checkpoints and torch's
distributed ones alike, and a plain torch optimizer loads them without noticing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opacus_slaclip.controllers import Controller, is_stateful

_PREFIX = "slaclip_"
_CONTROLLER_PREFIX = "slaclip_controller_"


@dataclass(frozen=True)
class SavedRelease:
    """What a checkpoint holds of ours; every value is public."""

    max_grad_norm: float
    initial_max_grad_norm: float
    num_slots: int
    num_releases: int
    rescale_to_unit_norm: bool = False
    controller_state: dict[str, float] = field(default_factory=dict)


def write_param_groups(
    param_groups: Sequence[dict[str, Any]],
    *,
    controller_state: dict[str, float],
    **entries: float,
) -> None:
    """Write the entries into every group."""
    flat = {_PREFIX + name: value for name, value in entries.items()}
    flat |= {_CONTROLLER_PREFIX + name: value for name, value in controller_state.items()}
    clear_param_groups(param_groups)  # of a controller that an earlier optimizer had
    for group in param_groups:
        group.update(flat)


def clear_param_groups(param_groups: Sequence[dict[str, Any]]) -> None:
    """Remove our entries, which nobody would keep up to date under another clipping."""
    for group in param_groups:
        for stale in [key for key in group if key.startswith(_PREFIX)]:
            del group[stale]


def read_param_groups(param_groups: Sequence[dict[str, Any]]) -> SavedRelease | None:
    """Read the entries back.

    Returns:
        None if no group has an entry of ours.

    Raises:
        ValueError: If the groups disagree or an entry is missing.
    """
    found = [
        {key: value for key, value in group.items() if key.startswith(_PREFIX)}
        for group in param_groups
    ]
    found = [entries for entries in found if entries]
    if not found:
        return None
    if any(entries != found[0] for entries in found[1:]):
        raise ValueError(
            "The checkpoint's param groups must agree on the SlaClip entries, got "
            f"{found}. Load an unmodified checkpoint."
        )
    entries = found[0]
    try:
        return SavedRelease(
            max_grad_norm=float(entries[_PREFIX + "max_grad_norm"]),
            initial_max_grad_norm=float(entries[_PREFIX + "initial_max_grad_norm"]),
            num_slots=int(entries[_PREFIX + "num_slots"]),
            num_releases=int(entries[_PREFIX + "num_releases"]),
            # Older checkpoints do not have it.
            rescale_to_unit_norm=bool(entries.get(_PREFIX + "rescale_to_unit_norm", False)),
            controller_state={
                key.removeprefix(_CONTROLLER_PREFIX): value
                for key, value in entries.items()
                if key.startswith(_CONTROLLER_PREFIX)
            },
        )
    except KeyError as error:
        raise ValueError(
            f"The checkpoint must have every SlaClip entry, {error} is missing. Load an unmodified "
            "checkpoint."
        ) from error


def check_controller_state(controller: Controller, saved: dict[str, float]) -> None:
    """Check that ``saved`` is the state of a controller like ``controller``.

    Raises:
        ValueError: If the names of the entries differ.
    """
    names = controller.state_dict() if is_stateful(controller) else None
    live = set(names or ())
    # A state that only appears with the first release has no names to compare yet.
    if live != set(saved) and names != {}:
        raise ValueError(
            f"The checkpoint's controller state {sorted(saved)} must match that of the live "
            f"controller {controller!r}, {sorted(live)}. Pass the controller it was saved with."
        )

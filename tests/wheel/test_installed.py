"""What a user has after `pip install opacus-slaclip`; .ci/run runs this on the built wheel."""

from __future__ import annotations

import math
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_slaclip
from opacus_slaclip import PrivacyEngine

DISTRIBUTION = "opacus-slaclip"


def test_the_installed_package_is_the_one_imported():
    location = Path(opacus_slaclip.__file__).resolve()

    assert sys.prefix != sys.base_prefix, "run this in a virtual environment"
    assert location.is_relative_to(Path(sys.prefix).resolve())


def test_the_wheel_installs_the_package_and_nothing_else():
    version = metadata.version(DISTRIBUTION)
    files = metadata.files(DISTRIBUTION)

    assert files is not None
    assert {file.parts[0] for file in files} == {
        "opacus_slaclip",
        f"opacus_slaclip-{version}.dist-info",
    }


def test_the_version_is_that_of_the_distribution():
    assert opacus_slaclip.__version__ == metadata.version(DISTRIBUTION)


def test_type_checkers_are_told_that_the_package_is_typed():
    assert resources.files("opacus_slaclip").joinpath("py.typed").is_file()


@pytest.mark.parametrize("optional", ["matplotlib", "sklearn"])
def test_the_package_needs_no_extra(optional):
    with pytest.raises(ModuleNotFoundError, match=optional):
        __import__(optional)


@pytest.mark.parametrize("clipping", ["slaclip", "slaclip-q"])
def test_quick_start(clipping):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()

    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=64),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=clipping,
    )
    assert optimizer.max_grad_norm == 1.0
    assert optimizer.slack_indicator is None

    thresholds = [optimizer.max_grad_norm]
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        thresholds.append(optimizer.max_grad_norm)

    assert len(set(thresholds)) == len(thresholds), "every step moves the threshold"
    assert all(type(value) is float and 0.1 <= value <= 50.0 for value in thresholds)
    assert torch.isfinite(optimizer.slack_indicator.values).all()
    assert math.isfinite(engine.get_epsilon(delta=1e-5))

"""Small networks with batch normalization, which Opacus must refuse or replace."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def _network(head: str, num_classes: int) -> nn.Sequential:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(32)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)),
        ("bn2", nn.BatchNorm2d(64)),
        ("relu2", nn.ReLU()),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        (head, nn.Linear(64, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))


def resnet18(weights: None = None, num_classes: int = 1000) -> nn.Module:
    """Return a network whose last layer is ``fc``, as in a ResNet."""
    return _network("fc", num_classes)


def densenet121(weights: None = None, num_classes: int = 1000) -> nn.Module:
    """Return a network whose last layer is ``classifier``, as in a DenseNet."""
    return _network("classifier", num_classes)


def mobilenet_v3_small(weights: None = None, num_classes: int = 1000) -> nn.Module:
    """Return a network with batch normalization, all that the tests need of a MobileNet."""
    return _network("classifier", num_classes)

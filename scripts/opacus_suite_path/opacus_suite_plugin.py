"""A pytest plugin that puts an engine in the place of Opacus's before any test is imported.

It also counts the calls of the engine's ``make_private`` and makes the tests repeatable. Each test
carries its node id and its count into the JUnit XML as properties, since a count kept in a global
would stay behind in a worker process.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Generator
from typing import Any

import hypothesis
import numpy as np
import opacus
import opacus.privacy_engine
import pytest
import torch

OPACUS = "opacus:PrivacyEngine"


class Substitution:
    """The engine of this run and how often its ``make_private`` was called."""

    def __init__(self, engine: Any, clipping: str, seed: int) -> None:
        self.engine = engine
        self.seed = seed
        self.calls = 0
        self._distributed = (torch.distributed.get_world_size, torch.distributed.get_rank)
        self._wrap("make_private", clipping, counted=True)
        # Its calls of make_private are counted there.
        self._wrap("make_private_with_epsilon", clipping, counted=False)
        modules: tuple[Any, ...] = (opacus, opacus.privacy_engine)
        for module in modules:
            module.PrivacyEngine = engine

    def _wrap(self, name: str, clipping: str, *, counted: bool) -> None:
        method: Callable[..., Any] = getattr(self.engine, name)

        @functools.wraps(method)
        def wrapped(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += counted
            # Opacus's helpers hand on clipping="flat" where a test did not choose it.
            if clipping != "flat" and kwargs.get("clipping", "flat") == "flat":
                kwargs["clipping"] = clipping
            return method(engine, *args, **kwargs)

        setattr(self.engine, name, wrapped)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Check that the tests hold the engine, and skip those that start other processes."""
        for item in items:
            module: Any = getattr(item, "module", None)
            held = getattr(module, "PrivacyEngine", self.engine)
            if held is not self.engine:
                raise pytest.UsageError(f"{module.__name__} holds {held}, not {self.engine}")
            if item.path.name.startswith("multigpu_"):
                reason = "starts processes of its own, which this substitution does not reach"
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Seed what the tests draw from: many do not, and must not depend on their order."""
        item.user_properties.append(("nodeid", item.nodeid))
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Count the calls of one test."""
        self.calls = 0
        try:
            return (yield)
        finally:
            item.user_properties.append(("make_private_calls", str(self.calls)))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Undo what the distributed Poisson tests leave replaced for the rest of the process."""
        torch.distributed.get_world_size, torch.distributed.get_rank = self._distributed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--engine", default=OPACUS, help="module:class to test")
    parser.addoption("--engine-clipping", default="flat", help="what the engine does for flat")
    parser.addoption("--engine-seed", type=int, default=0, help="seed before each test")


def pytest_configure(config: pytest.Config) -> None:
    """Substitute the engine in this process, a worker or the only one."""
    # No deadline unless a test sets its own, and the same examples with every engine.
    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("suite")
    module, _, name = config.getoption("--engine").partition(":")
    engine = getattr(importlib.import_module(module), name)
    clipping, seed = config.getoption("--engine-clipping"), config.getoption("--engine-seed")
    config.pluginmanager.register(Substitution(engine, clipping, seed))

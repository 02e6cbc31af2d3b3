"""Hides preloaded modules until the program imports one of them, and then applies the variables that it has set.

Many variables are read when torch is imported. In a forked worker torch is imported before the script sets them.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from elaunch.agent.forkserver import after_fork, reports
from elaunch.agent.forkserver.preload import Preloaded, restore_environment

# Scripts import it first, and set variables for torch afterwards. So it comes back alone.
_ALONE = "numpy"
_OTHERS = "others"


class HiddenModules:
    """A finder that gives the program the preloaded modules: the first import of any of them puts all back.

    It is made once, before any fork. Importing threads do not run a module again that another thread has put back: it
    stays a finder until there is one thread. Its base class is not importlib.abc's, which would bring thirty modules.
    """

    def __init__(self, preloaded: Preloaded) -> None:
        self._preloaded = preloaded
        self._modules = preloaded.hidden
        # Not back yet, by group. A group is taken by one `pop`, so by one thread.
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        for name, module in self._modules.items():
            self._hidden.setdefault(_group(name), {})[name] = module
        self._groups = set(self._hidden)
        self._back: set[str] = set()
        self._specs: dict[str, ModuleSpec | None] = {}
        self._environment: dict[str, str] = {}
        self._link = 0
        self._late: set[str] = set()
        if not self._modules:
            return
        after_fork.forget_ranks(self._modules)
        for name in self._modules:
            del sys.modules[name]
        _set_filters([each for each in warnings.filters if each not in preloaded.filters])
        sys.meta_path.insert(0, self)

    def begin(self, link: int) -> None:
        """Begin in a worker that has this link. Only later changes of its environment are applied."""
        self._environment = dict(os.environ)
        self._link = link

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        # A module that was put back is found for a thread that has missed it. If the program has removed it, or loads
        # it again (`target`), it is loaded from its file.
        is_gone = _group(name) in self._back and sys.modules.get(name) is not module
        if module is None or module.__spec__ is None or target is not None or is_gone:
            self._leave_if_done()
            return None
        known = self._specs.setdefault(name, module.__spec__)
        assert known
        loader: Any = _Handover(self, module, known)
        spec = ModuleSpec(name, loader, origin=known.origin)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.has_location = known.has_location
        # Python loads by the module's own spec if another thread puts the module back while this one is here.
        module.__spec__ = spec
        return spec

    def open(self, name: str) -> None:
        """Put modules back, and do what their imports do in this process."""
        back: dict[str, ModuleType] = {}
        groups = (_ALONE,) if _group(name) == _ALONE else tuple(self._groups)
        for group in groups:
            back |= self._hidden.pop(group, {})
        if not back:
            return
        # An entry that the program has made itself stays: a stand-in, or None, which forbids the import.
        own = {known: sys.modules[known] for known in back.keys() & sys.modules.keys()}
        # In one step: all workers of a restart do this at the same time.
        sys.modules.update(back)
        sys.modules.update(own)
        if not self._back:
            self._register()
        self._back.update(groups)
        changed = {n for n in {*self._environment, *os.environ} if self._environment.get(n) != os.environ.get(n)}
        if _OTHERS in groups:
            restore_environment({n: value for n, value in self._preloaded.sets.items() if n not in changed})
        after_fork.find_ranks(back)
        late = after_fork.apply(changed, back, self._preloaded.looked_up) - self._late
        if late:
            self._late |= late
            which = " and ".join(sorted(late))
            text = f"{which}: set by the program when {name} had been imported already, without effect there"
            message = {"event": "note", "text": f"{text}; set it in the shell, or use --no-preload"}
            reports.send(self._link, message)
        self._leave_if_done()

    def _register(self) -> None:
        """Make the warning filters and exit functions of the imports this process's own."""
        filters = self._preloaded.filters
        if filters:
            _set_filters([*filters, *(each for each in warnings.filters if each not in filters)])
        for call, args, kwargs in self._preloaded.at_exit:
            atexit.register(call, *args, **kwargs)

    def _leave_if_done(self) -> None:
        if self._back == self._groups and self in sys.meta_path and len(sys._current_frames()) == 1:
            for name, spec in self._specs.items():
                self._modules[name].__spec__ = spec
            # A new list: whoever goes through the old one misses no finder.
            sys.meta_path = [each for each in sys.meta_path if each is not self]


class _Handover:
    """Loads a module by returning the one that was preloaded."""

    def __init__(self, hidden: HiddenModules, module: ModuleType, spec: ModuleSpec) -> None:
        self._hidden = hidden
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._hidden.open(module.__name__)
        finally:
            # Not before: as long as the module has the import's own spec, other threads wait for the end of the import.
            module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)


def _group(name: str) -> str:
    return _ALONE if name.partition(".")[0] == _ALONE else _OTHERS


def _set_filters(filters: list[Any]) -> None:
    # After resetwarnings(), modules that have warned before check the filters again.
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]

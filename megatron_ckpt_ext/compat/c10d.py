"""Every c10d call of this process, observed below the names of torch.distributed.

A name such as ``all_reduce`` may have been imported anywhere before we come, so no name is patched: whatever it
was imported as, a function of torch.distributed ends in a method of the pybind class ``ProcessGroup``, and those
methods are replaced on the class. What C++ issues itself (functional collectives, the DTensor redistributions on
top of them, DDP's reducer) does not pass through the class; each group's own hooks, new in torch 2.14, report it.

Private names read in torch 2.14.1; ``tests/test_collectives.py`` notices when one of them moves.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OBJECT_COLLECTIVES", "PRIMITIVES", "Call", "Tap"]

OBJECT_COLLECTIVES: Final = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)
"""Functions of torch.distributed that pickle what they move, and move it in two or three primitive calls."""

PRIMITIVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "_allgather_base": "all_gather_into_tensor",
        "_reduce_scatter_base": "reduce_scatter_tensor",
        "all_gather_single": "all_gather_into_tensor",
        "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
        "all_to_all_single": "all_to_all_single",
        "allgather": "all_gather",
        "allgather_coalesced": "all_gather_coalesced",
        "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
        "allreduce": "all_reduce",
        "allreduce_coalesced": "all_reduce_coalesced",
        "alltoall": "all_to_all",
        "alltoall_base": "all_to_all_single",
        "barrier": "barrier",
        "broadcast": "broadcast",
        "gather": "gather",
        "gather_into_tensor": "gather_into_tensor",
        "gather_single": "gather_into_tensor",
        "monitored_barrier": "monitored_barrier",
        "recv": "recv",
        "recv_anysource": "recv",
        "reduce": "reduce",
        "reduce_scatter": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
        "scatter": "scatter",
        "send": "send",
    }
)
"""The methods of ``ProcessGroup`` that communicate (a release has most of them) and what each is counted as."""

_HOOK_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ALLGATHER": "all_gather",
        "ALLREDUCE": "all_reduce",
        "ALLTOALL": "all_to_all",
        "BARRIER": "barrier",
        "BROADCAST": "broadcast",
        "GATHER": "gather",
        "RECV": "recv",
        "REDUCE": "reduce",
        "REDUCE_SCATTER": "reduce_scatter",
        "SCATTER": "scatter",
        "SEND": "send",
    }
)
"""The members of ``HookOpName`` that communicate. They are coarser than methods: all gathers are one."""

_HOOK_ID: Final = 0x6D636B70
"""Our key among a group's hooks, which the caller chooses."""

_LOCK: Final = threading.Lock()
"""Guards the class ``ProcessGroup`` while its methods are replaced or restored."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a process group."""

    name: str
    """The primitive, by its name in torch.distributed."""
    owner: str | None
    """The object collective that issued it, if one did."""
    opens: bool
    """Whether it is the owner's first call: owners are counted by these."""


class _Thread(threading.local):
    """What is known about the current thread."""

    inside: bool = False
    """Inside a replaced method, so the group's hook is about to report the same call again."""
    owned: tuple[int, str, int] = (0, "", 0)
    """Frame, function and instruction of the last call that an object collective issued."""


class Tap:
    """The replaced methods and the hooks, shared by all observers of this process.

    Its owner is the class ``ProcessGroup``: the first observer installs it there, later ones find it there, and
    the last one to leave restores everything. Observers may leave in any order.
    """

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        self._c10d = distributed_c10d
        self._observers: tuple[Callable[[Call], None], ...] = ()
        self._thread = _Thread()
        self._methods: dict[str, _Method] = {}
        self._hooked: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    @staticmethod
    def attach(observer: Callable[[Call], None]) -> "Tap":
        """Report every later call, on any thread, to ``observer``, which must not raise. No collectives."""
        from torch.distributed import ProcessGroup

        with _LOCK:
            tap = getattr(ProcessGroup.allreduce, "tap", None) or Tap()
            tap._observers += (observer,)
            if not tap._methods:
                tap._replace_methods(ProcessGroup)
        tap.follow_groups()
        return tap

    def detach(self, observer: Callable[[Call], None]) -> None:
        """Stop reporting to ``observer``. No collectives."""
        from torch.distributed import ProcessGroup

        with _LOCK:
            self._observers = tuple(other for other in self._observers if other != observer)
            if self._observers:
                return
            self._restore_methods(ProcessGroup)
        for group in list(self._hooked):
            group.unregister_pre_hook(_HOOK_ID)
        self._hooked.clear()

    def follow_groups(self) -> None:
        """Hook the groups made since the last look; does nothing before torch 2.14. No collectives."""
        from torch.distributed import ProcessGroup

        if not hasattr(ProcessGroup, "register_pre_hook"):
            return
        for group in list(self._c10d._world.pg_map):
            if group not in self._hooked:
                group.register_pre_hook(_HOOK_ID, self._on_hook)
                self._hooked.add(group)

    def _replace_methods(self, cls: "type[ProcessGroup]") -> None:
        for method, name in PRIMITIVES.items():
            if method in vars(cls):
                pair = _Method(original=vars(cls)[method], observed=self._observed(getattr(cls, method), name))
                self._methods[method] = pair
                setattr(cls, method, pair.observed)

    def _restore_methods(self, cls: "type[ProcessGroup]") -> None:
        for method, pair in self._methods.items():
            # Somebody else's wrapper on top of ours stays; without observers ours only passes calls on.
            if vars(cls)[method] is pair.observed:
                setattr(cls, method, pair.original)
        self._methods.clear()

    def _observed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._thread.inside:
                return method(*args, **kwargs)
            self._report(name)
            self._thread.inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._thread.inside = False

        return _labelled(observed, self)

    def _on_hook(self, args: Any) -> None:
        name = _HOOK_NAMES.get(args.name.name)
        if name is not None and not self._thread.inside:
            self._report(name)

    def _report(self, name: str) -> None:
        call = self._classified(name)
        for observer in self._observers:
            observer(call)

    def _classified(self, name: str) -> Call:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            owner = frame.f_code.co_name
            if owner in OBJECT_COLLECTIVES and frame.f_globals is vars(self._c10d):
                return Call(name, owner, self._opens(id(frame), owner, frame.f_lasti))
            frame = frame.f_back
        return Call(name, None, False)

    def _opens(self, frame: int, owner: str, instruction: int) -> bool:
        """Whether this is another run of ``owner`` than the one behind the thread's last owned call.

        The frame itself cannot be kept, for its variables hold the gathered buffers, and the next run may get the
        same address; but within one run the instruction only moves forward.
        """
        last = self._thread.owned
        self._thread.owned = (frame, owner, instruction)
        return last[:2] != (frame, owner) or instruction <= last[2]


@dataclass(frozen=True, slots=True)
class _Method:
    """A method as it was found on the class, and what replaced it."""

    original: Any
    observed: Callable[..., Any]


def _labelled(observed: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    """Let later observers find the tap through the method."""
    setattr(observed, "tap", tap)  # noqa: B010 - a function type has no such attribute to assign to
    return observed

"""script.gradient_sync and script.unused_parameters: needless work of DDP is skipped."""

from __future__ import annotations

import sys
from threading import get_ident
from time import monotonic, sleep
from typing import Any

from flatout.cures.record import is_on, leave, took
from flatout.cures.steps import ScriptSteps
from flatout.hooks import unnumbered, wrap

SYNC, SEARCH = "script.gradient_sync", "script.unused_parameters"
# Number of first steps that run as written while the script is observed. _WATCHED_SEARCH: for
# Search; _WATCHED_SYNC: for Accumulation.
_WATCHED_SEARCH, _WATCHED_SYNC = 3, 2
# Longest wait in seconds for a thread of gloo to release the tensors that it has sent.
_LET_GO_S = 0.5


class Search:
    """Drops the search for unused parameters if all ranks used all parameters in the first steps.

    Until then the search runs as written, so that an unused parameter causes no error.
    """

    def __init__(self, torch: Any, steps: ScriptSteps) -> None:
        self._torch = torch
        self._steps = steps
        self._watched: dict[Any, _Used] = {}
        wrap(torch.nn.parallel.DistributedDataParallel, "__init__", "cures", self._met)
        steps.before.append(self._look)

    def _met(self, original: Any) -> Any:
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if is_on() and module.find_unused_parameters:
                self._meet(module)

        return init

    def _meet(self, module: Any) -> None:
        is_own = module.static_graph or module.gradient_as_bucket_view
        if is_own or module._use_python_reducer or getattr(module, "device_mesh", None) is not None:
            leave(
                SEARCH,
                "the model's DistributedDataParallel stores or reduces gradients in a special "
                "way (static_graph, gradient_as_bucket_view, a Python reducer or a device mesh)",
            )
            return
        self._watched[module] = _Used(module)

    def _look(self, optimizer: Any) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module, used in list(self._watched.items()):
            if not used.is_stepped_with(mine):
                continue
            used.close()
            if used.steps >= _WATCHED_SEARCH:
                del self._watched[module]
                used.end()
                self._decide(module, used.unused)

    def _decide(self, module: Any, unused: str) -> None:
        torch = self._torch
        is_whole = not unused and not module._comm_hooks
        device = next(module.parameters()).device
        flag = torch.tensor(int(is_whole), device=device)
        distributed = torch.distributed
        _all_reduce(distributed, flag, distributed.ReduceOp.MIN, module.process_group)
        if not int(flag):
            words = unused or "a parameter on another rank"
            why = "has a hook for what is sent" if module._comm_hooks else f"{words} is unused"
            leave(SEARCH, why)
            return
        # Rebuild the reducer for the same buckets, as unpickling a module does.
        module.find_unused_parameters = False
        module.reducer = None
        parameters, is_sparse = module._build_params_for_reducer()
        names = module._build_debug_param_to_name_mapping(parameters)
        module._ddp_init_helper(parameters, is_sparse, names, module.static_graph)
        took(SEARCH, "no search for unused parameters")


class _Used:
    """Records which parameters of a module get a gradient from this rank in each step."""

    def __init__(self, module: Any) -> None:
        self._names = {
            id(p): name for name, p in module.module.named_parameters() if p.requires_grad
        }
        self._have_gradients: set[int] = set()
        self.steps = 0
        self.unused = ""
        self._handles = [
            unnumbered(p.register_post_accumulate_grad_hook(self._note))
            for p in module.module.parameters()
            if p.requires_grad
        ]

    def _note(self, parameter: Any) -> None:
        self._have_gradients.add(id(parameter))

    def is_stepped_with(self, parameters: set[int]) -> bool:
        return not parameters.isdisjoint(self._names)

    def close(self) -> None:
        self.steps += 1
        without = [
            name for number, name in self._names.items() if number not in self._have_gradients
        ]
        self.unused = self.unused or next(iter(without), "")
        self._have_gradients.clear()

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


class Accumulation:
    """Sums gradients over the ranks in the last micro-batch of a step only.

    The number of micro-batches is observed in the first steps. A step may come sooner, as after the
    last batches of an epoch. Then the gradients so far are summed over the ranks before clipping
    and before the step.
    """

    def __init__(self, torch: Any, steps: ScriptSteps) -> None:
        self._torch = torch
        self._steps = steps
        self._seen: dict[Any, _Micro] = {}
        wrap(torch.nn.parallel.DistributedDataParallel, "forward", "cures", self._before_forward)
        wrap(torch.autograd, "backward", "cures", self._noted)
        self._hook_readers()
        steps.before.append(lambda optimizer: self._flush())
        steps.after.append(self._after_step)

    def _before_forward(self, original: Any) -> Any:
        torch, thread = self._torch, self._steps.thread
        is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and get_ident() == thread and is_on() and is_grad_enabled():
                self._begin(module)
            return original(module, *args, **kwargs)

        return forward

    def _begin(self, module: Any) -> None:
        micro = self._seen.setdefault(module, _Micro())
        if micro.is_left or not module.training:
            return
        if not module.require_backward_grad_sync and not micro.is_local:
            micro.is_left = True
            leave(SYNC, "the script uses no_sync already")
            return
        micro.events += "F"
        micro.is_local = micro.events.count("F") < micro.count
        module.require_backward_grad_sync = not micro.is_local

    def _noted(self, original: Any) -> Any:
        thread = self._steps.thread

        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if get_ident() == thread:
                for micro in self._seen.values():
                    micro.events += "B"

        return backward

    def _hook_readers(self) -> None:
        utils = self._torch.nn.utils
        for module in (utils, sys.modules["torch.nn.utils.clip_grad"]):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                wrap(module, name, "cures", self._flushed)
        wrap(self._torch.amp.GradScaler, "unscale_", "cures", self._flushed)

    def _flushed(self, original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            self._flush()
            return original(*args, **kwargs)

        return read

    def _flush(self) -> None:
        for module, micro in self._seen.items():
            if micro.is_local:
                micro.is_local = False
                _add_up(self._torch, module)

    def _after_step(self) -> None:
        for module, micro in self._seen.items():
            if micro.is_left:
                continue
            micro.close()
            module.require_backward_grad_sync = True
            if micro.count > 1:
                took(SYNC, f"gradients added up once in {micro.count} micro-batches")
            elif micro.steps == _WATCHED_SYNC:
                leave(SYNC, "each step has one backward pass, or steps differ")


class _Micro:
    """The micro-batches of one module's steps.

    Attributes:
        count: number of micro-batches in a step; 1 until it is known.
        events: forward and backward passes since the last step.
        is_local: True while gradients of this rank alone accumulate.
        is_left: True if this module runs as written, without the cure.
    """

    def __init__(self) -> None:
        self.count = 1
        self.steps = 0
        self.events = ""
        self.is_local = False
        self.is_left = False
        self._before = ""

    def close(self) -> None:
        self.steps += 1
        turns = self.events.count("F")
        if self.steps == _WATCHED_SYNC:
            is_regular = self.events == self._before == "FB" * turns
            self.count = turns if is_regular and turns > 1 else 1
        self._before, self.events = self.events, ""
        self.is_local = False


def _add_up(torch: Any, module: Any) -> None:
    distributed, group = torch.distributed, module.process_group
    parameters = [p for p in module.parameters() if p.requires_grad]
    used = torch.tensor([int(p.grad is not None) for p in parameters], device=parameters[0].device)
    _all_reduce(distributed, used, distributed.ReduceOp.MAX, group)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _all_reduce(distributed, parameter.grad, distributed.ReduceOp.SUM, group)
        parameter.grad /= distributed.get_world_size(group)


def _all_reduce(distributed: Any, tensor: Any, op: Any, group: Any) -> None:
    before = sys.getrefcount(tensor), tensor._use_count()
    distributed.all_reduce(tensor, op, group=group)
    until = monotonic() + (_LET_GO_S if tensor.device.type == "cpu" else 0)
    while (sys.getrefcount(tensor), tensor._use_count()) > before and monotonic() < until:
        sleep(1e-5)

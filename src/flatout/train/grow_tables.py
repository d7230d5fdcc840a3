"""Resizes embedding tables to the number of ids, together with their optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.data import Growth, digest_of
from flatout.errors import DataError, ModelError
from flatout.measure import available_bytes
from flatout.models import adapter_of, set_table_rows, table_weight
from flatout.optim import optimizer_adapter
from flatout.words import size_words

# Number of elements of a newly built table that are kept as a sample from which new rows are drawn.
_KEPT = 1 << 16
# Minimum number of elements from which a distribution can be estimated.
_FEW = 256
_ROWS_AT_ONCE = 1 << 15
# Number of tensors that an optimizer will create for each weight, before its first step.
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1}


class GrownRows(NamedTuple):
    """The new rows of a table.

    Attributes:
        size: required number of rows; a larger table keeps its rows.
        growth: old and new indices of the rows that are kept; None keeps all rows at their indices.
        key: text that, together with the table's name, seeds the values of new rows.
    """

    size: int
    growth: Growth | None
    key: str


def tables_of(model: nn.Module) -> dict[str, Any]:
    """Return the modules of the model's tables by name."""
    tables: dict[str, Any] = {}
    for name, module, _ in adapter_of(model).tables():
        if name in tables:
            raise ModelError(
                f"two tables of the model are called {name!r}, and rows by id are kept by name",
                do="give them different names",
            )
        tables[name] = module
    return tables


def as_built(tables: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return some elements of each table, from which new rows are drawn."""
    return {name: _elements(table) for name, table in tables.items()}


def _elements(table: Any) -> Tensor:
    weight = table_weight(table).detach()
    padding = getattr(table, "padding_idx", None)
    flat = weight.reshape(-1)
    if padding is not None and len(weight) > 1:
        at = int(padding) % len(weight) * weight.shape[1]
        flat = torch.cat([flat[:at], flat[at + weight.shape[1] :]])
    if flat.numel() < _FEW and not bool((flat == flat[0]).all()):
        flat = _of_its_kind(table, flat)
    return flat[:: max(1, flat.numel() // _KEPT)].clone()


def _of_its_kind(table: Any, flat: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_KEPT, generator=generator).to(flat)
    if isinstance(table, (nn.Embedding, nn.EmbeddingBag)):
        return drawn
    return drawn * flat.std() + flat.mean()


def check_memory(
    tables: Mapping[str, Any], rows: Mapping[str, GrownRows], optimizer: Any, new: Mapping[str, str]
) -> None:
    """Refuse tables that would not fit into memory, before any change."""
    wanted, copied, words = 0, 0, []
    for name, value in rows.items():
        weight = table_weight(tables[name])
        if value.size > len(weight) and weight.is_cpu:
            row = weight.shape[1] * weight.element_size()
            wanted += (value.size - len(weight)) * row * (1 + _states(optimizer, weight))
            copied = max(copied, len(weight) * row)  # a single tensor at a time exists twice
            words.append(f"{name} {value.size:,} rows of {row:,} bytes ({new[name]})")
    wanted += copied
    if wanted and wanted > (free := available_bytes()):
        raise DataError(
            f"the tables would not fit into memory: {'; '.join(words)}; growing takes "
            f"{size_words(wanted)} with the optimizer's state, and {size_words(free)} are free",
            do="in the ids of the schema: admit = 2 leaves out ids that occur once, most = N "
            'limits the rows, vocabulary = "none" with buckets hashes ids to a fixed number '
            "of rows",
        )


def _states(optimizer: Any, weight: Tensor) -> int:
    state = optimizer.state.get(weight) if optimizer is not None else None
    if state:
        return sum(torch.is_tensor(v) and v.shape == weight.shape for v in state.values())
    return _STATES.get(type(optimizer).__name__, 2)


@torch.no_grad()
def set_rows(
    tables: Mapping[str, Any],
    rows: Mapping[str, GrownRows],
    optimizer: Any,
    built: Mapping[str, Tensor],
) -> None:
    """Resize tables in place: parameters stay the same objects.

    Rows of known ids keep weights and state. New rows are drawn from the elements of the newly
    built table, and their state is the optimizer's initial state.
    """
    done: set[int] = set()
    for name, value in rows.items():
        weight = table_weight(tables[name])
        if id(weight) not in done:
            done.add(id(weight))
            _set_rows(weight, value, optimizer, built[name], _generator(value.key, name))
        set_table_rows(tables[name])


def _set_rows(
    weight: Tensor, rows: GrownRows, optimizer: Any, elements: Tensor, generator: torch.Generator
) -> None:
    old, fresh = weight.shape, _fresh(rows, len(weight))
    weight.data = _arranged(weight.data, rows, fresh, elements, generator)
    weight.grad = None

    if optimizer is None:
        return
    adapter = optimizer_adapter(optimizer)

    def change(key: str, value: Tensor) -> Tensor:
        start = value.new_full((1,), adapter.first_state(weight, key))
        return _arranged(value, rows, fresh, start, generator)

    adapter.change_state(weight, old, change)


def resize(table: Any, size: int, optimizer: Any = None) -> None:
    """Resize a table, and its state if any, to the rows of weights that are loaded next."""
    weight = table_weight(table)
    old = weight.shape
    if len(weight) != size:
        weight.data = weight.data.new_zeros(size, weight.shape[1])
        weight.grad = None
        if optimizer is not None:
            own = optimizer_adapter(optimizer)
            own.change_state(weight, old, lambda _, v: v.new_zeros(size, v.shape[1]))
    set_table_rows(table)


def _fresh(rows: GrownRows, there: int) -> Tensor:
    size = max(rows.size, there)
    if rows.growth is None:
        return torch.arange(there, size)
    is_fresh = torch.ones(size, dtype=torch.bool)
    is_fresh[torch.from_numpy(rows.growth.new_rows)] = False
    is_fresh[rows.size :] = False
    return is_fresh.nonzero().reshape(-1)


def _arranged(
    values: Tensor, rows: GrownRows, fresh: Tensor, elements: Tensor, generator: torch.Generator
) -> Tensor:
    growth, there, made = rows.growth, len(values), values
    moves = growth is not None and bool((growth.old_rows != growth.new_rows).any())
    if moves or rows.size > there:
        made = values.new_empty(max(rows.size, there), values.shape[1])
        made[:there] = values
    if moves:
        assert growth is not None
        made[torch.from_numpy(growth.new_rows)] = values[torch.from_numpy(growth.old_rows)]
    for at in range(0, len(fresh), _ROWS_AT_ONCE):
        part = fresh[at : at + _ROWS_AT_ONCE].to(values.device)
        shape = (len(part), values.shape[1])
        if len(elements) == 1:
            made[part] = elements.to(values).expand(shape)
        else:
            drawn = torch.randint(0, len(elements), shape, generator=generator)
            made[part] = elements.cpu()[drawn].to(values)
    return made


def _generator(key: str, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(digest_of(key, name)[:15], 16))


def readers_of(
    tables: Mapping[str, Any], numbers: Sequence[tuple[str, range]], run: Any
) -> dict[str, list[str]]:
    """Return, by table, the columns whose unchanged ids are all that the table reads."""
    columns_of: dict[str, dict[str | None, None]] = {}
    handles = []
    for name, table in tables.items():

        def look(_: Any, args: Any, kwargs: Any, name: str = name, table: Any = table) -> Any:
            given = [*args, *kwargs.values()]
            if not given or not torch.is_tensor(given[0]) or not given[0].numel():
                return None
            ids = given[0].detach().to(torch.int64)
            trained = ids[ids != 0]  # without the padding of ragged rows
            low, high = (int(trained.min()), int(trained.max())) if len(trained) else (0, 0)
            own = [c for c, held in numbers if held.start <= low and high < held.stop]
            columns_of.setdefault(name, {})[own[0] if own else None] = None
            inside = ids.remainder(len(table_weight(table))).to(given[0].dtype)
            if args:
                return (inside, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): inside}

        handles.append(table.register_forward_pre_hook(look, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: [column for column in own if column is not None]
        for name, own in columns_of.items()
        if None not in own
    }


def read_together(
    tables: Mapping[str, Any], readers: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """Return groups of columns whose ids share rows, because they read the same weights."""
    by_weight: dict[int, dict[str, None]] = {}
    for name, columns in readers.items():
        by_weight.setdefault(id(table_weight(tables[name])), {}).update(dict.fromkeys(columns))
    groups: list[dict[str, None]] = []
    for own in by_weight.values():
        overlapping = [group for group in groups if group.keys() & own.keys()]
        groups = [group for group in groups if not group.keys() & own.keys()]
        groups.append(dict.fromkeys(column for group in (*overlapping, own) for column in group))
    return [list(group) for group in groups]

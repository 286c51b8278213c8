"""Records that stand under a key of an object, as APIs and annotation programs write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from allhands.data.values import ValuePlace


def inner_record(
    values: Mapping[str, Any], is_record: Callable[[Mapping[str, Any]], bool], place: ValuePlace
) -> dict[str, Any] | None:
    """The one record that an object holds under a key, with what stands beside it; None if it is a record itself.

    None, too, if it holds none, or several.

    ``{"row_idx": 7, "row": {"messages": [...]}}`` holds one.

    Raises:
        DataError: the record was cut off.
    """
    if is_record(values):
        return None
    objects = {key: cast(dict[str, Any], value) for key, value in values.items() if isinstance(value, dict)}
    found = [key for key, value in objects.items() if is_record(value)]
    if len(found) != 1:
        return None
    if cut := values.get("truncated_cells"):
        hint = "fetch the data set itself: name it as OWNER/NAME, or its Parquet files"
        place.fail(f"the record was cut off where it was fetched from (truncated_cells: {cut})", hint)
    return {name: value for name, value in values.items() if name != found[0]} | objects[found[0]]

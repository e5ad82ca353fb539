"""The `exact` column of changes: per row a JSON object of the values that their column's type cannot hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_COMMA = ", "


def combine(unfit: Mapping[str, pa.Array[Any]]) -> pa.Array[Any] | None:
    """Combine texts by column name (null where the value fits) into one column of JSON objects; None without columns.

    Each distinct text is encoded only once, because usually many rows hold the same one, such as `infinity`.
    """
    if not unfit:
        return None
    joined = pc.binary_join_element_wise(*(_members(name, texts) for name, texts in unfit.items()), "")
    objects = pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, len(_COMMA)), "}", "")
    return pc.if_else(pc.equal(joined, ""), None, objects)


def _members(name: str, texts: pa.Array[Any]) -> pa.Array[Any]:
    """Each text as `, "name": "text"`, empty for null. The caller cuts the comma from the first member of a row."""
    encoded = texts.dictionary_encode()
    prefix = _COMMA + json.dumps(name, ensure_ascii=False) + ": "
    members = [prefix + json.dumps(text, ensure_ascii=False) for text in encoded.dictionary.to_pylist()]
    return pa.array(members, pa.string()).take(encoded.indices).fill_null("")

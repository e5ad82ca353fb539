"""The keys of `destination:` with `type: console`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from tailrace.option.value import FilePath, OptionContext, TypedOptions


def _path(value: object, info: ValidationInfo) -> object:
    return OptionContext.of(info).state / "console" if value is None else value


class ConsoleOptions(TypedOptions):
    """Lines on standard output."""

    type: Literal["console"]
    format: Literal["text", "json"] = Field(default="text", description="`tailrace run FILE --json` prints JSON anyway")
    copied_rows: bool = Field(default=False, description="also print the rows of copies")
    width: int = Field(default=120, ge=1, description="values that are longer as text are cut; in JSON none is")
    path: Annotated[FilePath, BeforeValidator(_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="where lines wait to be printed; default: the folder `console` in `state`",
    )

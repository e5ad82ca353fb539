"""`python -m tailrace.source.postgres`: the receiver process."""

import sys
from typing import NoReturn


class WithoutPandas:
    """Lets pyarrow find no pandas: nothing here needs it, and loading it takes longer than all the rest."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the receiver does without", name=name)


def run() -> NoReturn:
    sys.meta_path.insert(0, WithoutPandas())
    from tailrace.source.postgres.receiver import main

    sys.exit(main())


run()

"""What `import tailrace` offers."""

from __future__ import annotations

import subprocess
import sys

import tailrace


def test_every_public_name_is_there_and_the_list_is_sorted() -> None:
    assert list(tailrace.__all__) == sorted(tailrace.__all__)
    for name in tailrace.__all__:
        assert getattr(tailrace, name) is not None


def test_importing_tailrace_loads_neither_spark_nor_arrow() -> None:
    code = "import sys, tailrace; print(sorted({'pyspark', 'pyarrow', 'psycopg', 'deltalake'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

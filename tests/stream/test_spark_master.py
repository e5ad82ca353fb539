from __future__ import annotations

import pytest

from tailrace.errors import PreflightError
from tailrace.stream.spark_master import is_local, reaches_loopback
from tailrace.stream.spark_session import driver_host

OTHERS = ("spark://10.0.0.2:7077", "spark://master:7077", "yarn", "k8s://https://127.0.0.1:6443")
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@pytest.mark.parametrize(
    ("master", "local", "loopback"),
    [
        ("local[*]", True, True),
        ("local-cluster[2,1,512]", False, True),
        ("spark://127.0.0.1:7077", False, True),
        ("spark://[::1]:7077", False, True),
        ("spark://localhost:7077", False, True),
        *((other, False, False) for other in OTHERS),
    ],
)
def test_a_master_says_where_tasks_run(master: str, local: bool, loopback: bool) -> None:
    assert (is_local(master), reaches_loopback(master)) == (local, loopback)


@pytest.mark.parametrize("master", ["local[2]", "spark://127.0.0.1:7077"])
def test_the_driver_listens_on_loopback_where_that_is_enough(master: str) -> None:
    assert driver_host(master, {}) == LOOPBACK


@pytest.mark.parametrize("master", OTHERS)
def test_a_driver_that_executors_elsewhere_cannot_reach_is_refused_with_the_setting_to_add(master: str) -> None:
    with pytest.raises(PreflightError, match="other machines") as raised:
        driver_host(master, {})
    assert "spark.driver.host" in (raised.value.fix or "")
    assert driver_host(master, {"spark.driver.host": "10.0.0.5"}) == {}, "Spark listens there itself"

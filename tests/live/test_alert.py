"""A running pipeline tells an endpoint what is wrong with it: once, whatever happens to its process."""

from __future__ import annotations

import json

from tailrace.state import SqliteStore
from tailrace.testing.endpoint import WebhookEndpoint
from tailrace.testing.wait import wait_until
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

CANARY = "c4nary-T0ken"
ROW = "c4naryRow"


def test_a_table_in_error_is_told_once_also_to_a_killed_and_restarted_run_and_so_is_its_end(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE strict (id int PRIMARY KEY, v text)", f"INSERT INTO strict VALUES (1, '{ROW}')")

    def told() -> list[tuple[str, str]]:
        return [(each["alert"], each["status"]) for each in (json.loads(one.body) for one in endpoint.taken)]

    with WebhookEndpoint() as endpoint:
        scenario.write(
            tables={"settings": {"public.strict": {"schema_changes": "stop", "errors": {"retry": "manual"}}}},
            alerts={
                "webhook": {"url": f"{endpoint.url}/{CANARY}", "headers": {"Authorization": CANARY}},
                "errored": {"for": 0},
            },
        )
        with Following(scenario) as following:
            following.catch_up()
            scenario.sql("ALTER TABLE strict ADD COLUMN more int", "INSERT INTO strict VALUES (2, 'x', 3)")
            wait_until(lambda: told() == [("errored", "firing")])
            alert = json.loads(endpoint.taken[0].body)
            assert alert["tables"] == ["public.strict"]
            assert "public.strict" in alert["text"]
            assert ROW not in endpoint.taken[0].body.decode()

            following.run.kill()
            following.run = scenario.run().start()
            following.catch_up(without=("public.strict",))
            with SqliteStore("scene", scenario.state).open_reading() as store:
                assert [each.name for each in store.alerts() if each.told_at] == ["errored"]
            scenario.execute("resync", "public.strict")
            wait_until(lambda: told() == [("errored", "firing"), ("errored", "resolved")])
            following.run.terminate()
            assert following.run.wait() == 0
            assert CANARY not in following.run.log_file.read_text(errors="replace")
        assert len(endpoint.requests) == 2
        for file in scenario.state.rglob("*"):
            assert not file.is_file() or CANARY.encode() not in file.read_bytes()

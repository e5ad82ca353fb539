"""When people are told, with a clock that is set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tailrace.alert.condition import Condition
from tailrace.alert.watch import News, step
from tailrace.state.report import AlertRecord

START = datetime(2026, 11, 19, tzinfo=UTC)
WAIT = 60.0


class Alarm:
    """One alert, and what people know of it: each news is delivered, unless `is_deaf`."""

    def __init__(self, repeat: float | None = None) -> None:
        self.repeat = repeat
        self.record: AlertRecord | None = None
        self.is_deaf = False

    def look(self, seconds: float, found: Condition | None) -> News | None:
        """The news at so many seconds after the start."""
        at = START + timedelta(seconds=seconds)
        done = step("errored", self.record, found, at, WAIT, self.repeat)
        record, news = done.record, done.news
        if news == "firing" and not self.is_deaf and found is not None and record is not None:
            record = AlertRecord("errored", True, record.since, at, found.text, found.tables)
        self.record = None if news == "resolved" and not self.is_deaf else record
        return news


HELD = Condition("a table is in error", ("public.a",))
MORE = Condition("2 tables are in error", ("public.a", "public.b"))


def test_an_alert_is_sent_once_it_has_held_and_then_no_more() -> None:
    alarm = Alarm()
    looks = [alarm.look(at, HELD) for at in (0, 30, 60, 65, 100_000)]
    assert looks == [None, None, "firing", None, None]


def test_what_does_not_hold_long_is_not_told() -> None:
    alarm = Alarm()
    assert [alarm.look(at, found) for at, found in ((0, HELD), (50, None), (55, HELD), (110, HELD))] == [None] * 4
    assert alarm.look(115, HELD) == "firing"


def test_an_alert_is_resolved_once_it_has_not_held_as_long() -> None:
    alarm = Alarm()
    looks = ((0, HELD), (60, HELD), (70, None), (80, HELD), (90, None), (149, None), (150, None), (300, None))
    assert [alarm.look(*each) for each in looks] == [None, "firing", None, None, None, None, "resolved", None]
    assert alarm.record is None


def test_an_alert_is_repeated_no_more_often_than_asked_for() -> None:
    alarm = Alarm(repeat=600)
    told = [at for at in range(0, 2000, 10) if alarm.look(at, HELD)]
    assert told == [60, 660, 1260, 1860]


def test_another_table_in_error_is_told_but_not_sooner_than_a_minute_after_the_last() -> None:
    alarm = Alarm()
    assert [alarm.look(at, HELD) for at in (0, 60)] == [None, "firing"]
    assert [alarm.look(at, MORE) for at in (70, 119, 120, 125, 500)] == [None, None, "firing", None, None]
    assert alarm.look(600, HELD) is None


def test_what_could_not_be_told_is_news_until_it_is() -> None:
    alarm = Alarm()
    alarm.is_deaf = True
    assert [alarm.look(at, HELD) for at in (0, 60, 65)] == [None, "firing", "firing"]
    alarm.is_deaf = False
    assert [alarm.look(at, HELD) for at in (70, 75)] == ["firing", None]


def test_people_who_were_not_told_need_not_know_that_it_is_over() -> None:
    alarm = Alarm()
    alarm.is_deaf = True
    assert [alarm.look(at, HELD) for at in (0, 60)] == [None, "firing"]
    assert alarm.look(65, None) is None
    assert alarm.record is None

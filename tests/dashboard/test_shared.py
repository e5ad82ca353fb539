"""What several ask for is made once, and what takes long is made less often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tailrace.dashboard.shared import SharedReadings
from tailrace.errors import UnavailableError


class Scene:
    """Readings at a time of their own; `count` says how often the value was made."""

    def __init__(self, took: float = 0.0) -> None:
        self.now = 0.0
        self.count = 0
        self.took = took
        self.readings = SharedReadings(lambda: self.now)

    def make(self) -> int:
        self.count += 1
        self.now += self.took
        return self.count

    async def get(self) -> int:
        return await self.readings.get("key", self.make, 1.0)


def test_a_value_is_made_once_for_all_who_ask_and_again_when_it_is_old() -> None:
    async def ask() -> None:
        scene = Scene()
        assert await asyncio.gather(*(scene.get() for _ in range(10))) == [1] * 10
        scene.now = 0.9
        assert await scene.get() == 1
        scene.now = 1.0
        assert await scene.get() == 2

    asyncio.run(ask())


@pytest.mark.parametrize(("took", "kept"), [(0.1, 1.0), (0.4, 2.0), (1.5, 7.5), (4.0, 10.0)])
def test_what_takes_long_is_made_less_often_and_never_waits_for_long(took: float, kept: float) -> None:
    async def ask() -> None:
        scene = Scene(took)
        await scene.get()
        scene.now = kept - 0.01
        assert await scene.get() == 1
        scene.now = kept + 0.01
        scene.took = 0.0
        assert await scene.get() == 2

    asyncio.run(ask())


def test_one_who_goes_away_ends_it_for_no_one_else() -> None:
    async def ask() -> None:
        scene = Scene()
        first, second = asyncio.create_task(scene.get()), asyncio.create_task(scene.get())
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 1

    asyncio.run(ask())


def test_an_error_is_shared_and_tried_again() -> None:
    async def ask() -> None:
        scene = Scene()

        def fail() -> int:
            scene.count += 1
            raise UnavailableError("no")

        async def failing(make: Callable[[], int]) -> None:
            with pytest.raises(UnavailableError):
                await scene.readings.get("key", make, 1.0)

        await asyncio.gather(failing(fail), failing(fail))
        assert scene.count == 1
        scene.now = 1.0
        assert await scene.get() == 2

    asyncio.run(ask())

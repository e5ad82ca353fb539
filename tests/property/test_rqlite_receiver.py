"""A receiver under nodes that drop, repeat, freeze and lead at the same time: each event is in its journal once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.request import parse
from tests.support.rqlite_posting import Entry, body, entry, insert, lines

SERVICE = "svc"
FIRST = 10
"""Up to this index every node has everything: what comes before all that is known is another history."""


@dataclass
class Node:
    """What one node has queued: its own batches of the cluster's log, without what did not fit its channel."""

    name: str
    chance: random.Random
    drops: bool
    batches: list[list[Entry]] = field(default_factory=list)
    sent: int = 0
    """Up to which index it knows that everything was sent."""
    is_full: bool = False

    def queue(self, entries: list[Entry]) -> None:
        kept = [one for one in entries if not self.drops or one["index"] <= FIRST or self._fits()]
        while kept:
            size = self.chance.randint(1, 6)
            batch, kept = kept[:size], kept[size:]
            if any(one["index"] for one in batch):
                stamped = [{**one, "commit_timestamp": self.chance.randint(1, 10**12)} for one in batch]
                self.batches.append(stamped)

    def _fits(self) -> bool:
        """Whether its channel has room. What does not fit are mostly several transactions in a row."""
        if self.chance.random() < (0.1 if self.is_full else 0.02):
            self.is_full = not self.is_full
        return not self.is_full

    def to_send(self) -> Iterator[list[Entry]]:
        """What it sends from the moment when it leads."""
        for batch in list(self.batches):
            if max(one["index"] for one in batch) > self.sent:
                yield batch

    def learn(self, watermark: int) -> None:
        self.sent = max(self.sent, watermark)
        self.batches = [batch for batch in self.batches if max(one["index"] for one in batch) > self.sent]


class Scene:
    """A cluster of three nodes and its receiver."""

    def __init__(self, folder: Path, chance: random.Random, *, zeros: bool) -> None:
        self.folder, self.chance, self.zeros = folder, chance, zeros
        # Where both happen, an event with index 0 may come twice, the second time as a change without its row.
        self.nodes = [Node(f"n{number}", chance, drops=not zeros) for number in (1, 2, 3)]
        self.index = self.row = self.watermark = 3
        self.acknowledged: set[int] = set()
        self.cluster = self._open()

    def _open(self) -> Cluster:
        return Cluster(SERVICE, self.folder, segment_bytes=20_000, max_bytes=10**9)

    def write(self, count: int) -> None:
        """Transactions; elections and DDL use an index, too."""
        made: list[Entry] = []
        for _ in range(count):
            self.index += self.chance.choice([1, 1, 1, 2, 3])
            made.append(entry(self.index, *(self._event() for _ in range(self.chance.randint(1, 4)))))
            if self.zeros and self.chance.random() < 0.2:
                made.append(entry(0, self._event()))
        for node in self.nodes:
            node.queue(made)

    def _event(self) -> dict[str, Any]:
        self.row += 1
        return insert(self.row)

    def post(self, node: Node, batch: list[Entry]) -> bool:
        """Post a batch, perhaps several times or cut short, and return whether the node got its answer."""
        content = body(batch, service=SERVICE, node=node.name)
        for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
            if self.chance.random() < 0.05:
                continue  # it never arrived
            if self.chance.random() < 0.05:
                self.restart()
            assert self.cluster.commit([parse(content)]) == [None], self.cluster.error
            self.acknowledged |= {event["new_row_id"] for one in batch for event in one["events"]}
            if self.chance.random() < 0.9:
                return True
        return False

    def lead(self, *leaders: Node) -> None:
        """Nodes that each believe to lead send, in any order among each other, each until it learns better."""
        sending = [(node, node.to_send()) for node in leaders]
        while sending:
            turn = self.chance.choice(sending)
            node, batches = turn
            batch = next(batches, None)
            if batch is None or (len(sending) > 1 and self.chance.random() < 0.1):
                sending.remove(turn)
                continue
            while not self.post(node, batch):
                if self.chance.random() < 0.2:  # it dies, or is no leader any more
                    sending.remove(turn)
                    break
            else:
                node.sent = max(node.sent, *(one["index"] for one in batch))
                self.watermark = max(self.watermark, node.sent)
                if self.chance.random() < 0.3:
                    for other in self.nodes:
                        if self.chance.random() < 0.8:
                            other.learn(node.sent)

    def restart(self) -> None:
        """The receiver dies, and may not have saved what it remembers."""
        if self.chance.random() < 0.5:
            self.cluster._unsaved = 0
        self.cluster.close()
        self.cluster = self._open()


@pytest.mark.parametrize("zeros", [False, True], ids=["dropped", "index 0"])
@pytest.mark.parametrize("seed", range(5))
def test_what_nodes_send_in_whatever_order_is_held_once(seed: int, zeros: bool, tmp_path: Path) -> None:
    chance = random.Random(seed)
    scene = Scene(tmp_path, chance, zeros=zeros)
    for _ in range(40):
        scene.write(chance.randint(0, 12))
        leaders = chance.sample(scene.nodes, chance.choice([1, 1, 2]))
        scene.lead(*leaders)
    for node in scene.nodes:
        scene.lead(node)
    scene.cluster.close()
    held = lines(tmp_path, SERVICE)
    rows = [(one.get("sent") or one)["new_row_id"] for one in held]
    assert sorted(rows) == sorted(scene.acknowledged)
    in_time = [one["new_row_id"] for one in held if "sent" not in one]
    assert in_time == sorted(in_time)

"""`python -m tailrace.destination.webhook.sender`: the sender process."""

import logging
import signal
import sys
import time
from collections.abc import Callable

from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.sender.sender import Sender
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.errors import OwnedError, TailraceError
from tailrace.system.child_process import BUSY, serve, write_status


def send(text: str, stopping: Callable[[], bool]) -> int:
    """Send until asked to stop, by the end of standard input or by SIGTERM."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    options, pipeline = WebhookOptions.from_text(text)
    try:
        sender = Sender(options, pipeline, lambda: bool(asked) or stopping())
    except OwnedError:
        return BUSY
    except TailraceError as error:
        write_status(options.queue.path, STATUS, {"at": time.time(), "error": error.describe()})
        return error.exit_code
    try:
        sender.run()
    except TailraceError as error:
        return error.exit_code
    return 0


sys.exit(serve(send))

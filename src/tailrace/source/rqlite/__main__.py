"""`python -m tailrace.source.rqlite`: the receiver process."""

import sys

from tailrace.source.rqlite.receiver import run
from tailrace.system.child_process import serve

sys.exit(serve(run))

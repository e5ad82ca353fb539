"""`python -m tailrace.source.rqlite`: the receiver process."""

import sys

from tailrace.child import serve
from tailrace.source.rqlite.receiver import run

sys.exit(serve(run))

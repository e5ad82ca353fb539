"""`python -m tailrace.source.postgres`: the receiver process."""

import sys

from tailrace.source.postgres.receiver import main

sys.exit(main())

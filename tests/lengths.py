"""How long the tests take that can take any time, from the environment; short by default.

Not `HEADRACE_…`: to the service such a name that it does not know is a mistake.
"""

from __future__ import annotations

import os

STORM_S = float(os.environ.get("HRTEST_STORM_S", "5"))
"""Seconds of each storm of kills, and of clients that leave."""
FROZEN_S = float(os.environ.get("HRTEST_FROZEN_S", "4"))
"""Seconds that a pool is frozen."""
ROUNDS = int(os.environ.get("HRTEST_ROUNDS", "20"))
"""How often the whole service is started and killed."""
SEED = int(os.environ.get("HRTEST_STORM_SEED", "0")) or int.from_bytes(os.urandom(4), "big")
"""Of everything random in a storm; tests print it."""
FUZZ_S = float(os.environ.get("HRTEST_FUZZ_S", "10"))
"""Seconds for which requests made by chance are sent to our worker and to gunicorn's."""
FUZZ_EXAMPLES = int(os.environ.get("HRTEST_FUZZ_EXAMPLES", "500"))
"""How many broken requests our reading of a head is held against gunicorn's."""

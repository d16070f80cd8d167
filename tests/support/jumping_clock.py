"""snapctl under a clock that jumps by up to ten years at each look at it.

usage: jumping_clock.py SEED COMMAND ARGUMENT…
"""

from __future__ import annotations

import random
import sys
import time

JUMPS = (0.0, 0.0, 1.0, -1.0, 3600.0, -3600.0, 86_400.0, -86_400.0, 400 * 86_400.0, -400 * 86_400.0, 3650 * 86_400.0)

_dice = random.Random(sys.argv[1])
_real = time.time
_real_ns = time.time_ns
time.time = lambda: _real() + _dice.choice(JUMPS)
time.time_ns = lambda: _real_ns() + int(_dice.choice(JUMPS)) * 10**9

from snapctl.cli.main import main  # noqa: E402 - what it imports takes the clock as it is

sys.exit(main(sys.argv[2:]))

"""A prune that is loaded and waits for a line before it begins, so that a kill can hit every moment of its work.

usage: prune_worker.py SAVE_DIR OPTION…
"""

import sys

from snapctl.cli.main import main

if sys.argv[1].startswith("gs://"):
    import snapctl.storage.gcs
import snapctl.cli.app
import snapctl.cli.prune_cmd  # noqa: F401

print("ready", flush=True)
sys.stdin.readline()
code = main(["prune", *sys.argv[1:]])
print("done", flush=True)
sys.exit(code)

"""``python -m snapctl``."""

from snapctl.cli.main import run

if __name__ == "__main__":
    run()

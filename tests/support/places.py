"""Save directories of either kind, written to past snapctl."""

from __future__ import annotations

import pathlib
import shutil
from dataclasses import dataclass

from tests.support.servers import Bucket


@dataclass(frozen=True)
class SaveDir:
    """A save directory, on this machine or in a bucket."""

    url: str
    root: pathlib.Path | None = None
    bucket: Bucket | None = None

    def write(self, path: str, data: bytes = b"") -> None:
        """Also a `tests.support.snapshots.Write`."""
        if self.root is not None:
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        else:
            assert self.bucket is not None
            self.bucket.write(f"run/{path}", data)

    def read(self, path: str) -> bytes:
        if self.root is not None:
            return (self.root / path).read_bytes()
        assert self.bucket is not None
        return self.bucket.read(f"run/{path}")

    def delete(self, path: str) -> None:
        if self.root is not None:
            (self.root / path).unlink()
        else:
            assert self.bucket is not None
            self.bucket.delete(f"run/{path}")

    def delete_dir(self, path: str) -> None:
        """A directory and all that lies in it."""
        if self.root is not None:
            shutil.rmtree(self.root / path)
        else:
            assert self.bucket is not None
            for name in self.bucket.names(f"run/{path}/"):
                self.bucket.delete(name)

    def names(self, path: str = "") -> list[str]:
        """All files below a directory, sorted; and of empty directories the name with a slash."""
        if self.root is not None:
            base = self.root / path
            found = [p for p in base.rglob("*") if p.is_file() or (p.is_dir() and not any(p.iterdir()))]
            return sorted(p.relative_to(self.root).as_posix() + "/" * p.is_dir() for p in found)
        assert self.bucket is not None
        prefix = f"run/{path}".rstrip("/") + "/"
        return sorted(name.removeprefix("run/") for name in self.bucket.names(prefix))

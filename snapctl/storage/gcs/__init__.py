"""Google Cloud Storage, over plain HTTP through gcsfs's core class. Importing it imports gcsfs."""

from __future__ import annotations

from snapctl.storage.gcs.client import open_file_system
from snapctl.storage.gcs.storage import GcsStorage, open_gcs

__all__ = ["GcsStorage", "open_file_system", "open_gcs"]

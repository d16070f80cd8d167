"""Objects deleted from GCS: in batches whose parts have a condition each, or singly where there are no batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from threading import Event
from typing import Any

from snapctl.storage.gcs.batches import BATCH_SIZE, format_deletions, parse_answers, spread
from snapctl.storage.gcs.client import FAILED_TRIES, MAX_ATTEMPTS, pause_seconds
from snapctl.storage.gcs.connection import GcsConnection
from snapctl.storage.gcs.errors import means_no_batches, part_error, translate_gcs_error
from snapctl.storage.values import DeletedFiles, FileInfo

DELETE_JOBS = 16
"""Batches of deletions under way at a time, over all directories."""
SINGLE_JOBS = 4
"""The same for single deletions, in place of each batch."""


class GcsDeletions(GcsConnection):
    """Deleting."""

    def delete(self, path: str, *, version: str = "") -> bool:
        return self._run(self._delete_object(self._key(path), version), path)

    async def _delete_object(self, key: str, version: str) -> bool:
        """One object; False if it was gone. A deletion whose answer was lost and that finds nothing when it is tried
        again has done its work."""
        if version and not self._fs.on_google and not self._fs.batches_are_safe:  # emulators ignore the condition
            found = await self._look(key)
            if found is None:
                return False
            if found.generation != version:
                raise FileExistsError(key)
        try:
            await self._call("DELETE", "b/{}/o/{}", self._bucket, key, ifGenerationMatch=version or None)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return FAILED_TRIES.get() > 0
        except FileExistsError:  # the condition does not hold: nor does it once one's own first try has done its work
            if FAILED_TRIES.get() == 0 or await self._look(key) is not None:
                raise
        return True

    def delete_files(
        self,
        files: Sequence[FileInfo],
        *,
        stop: Event | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> DeletedFiles:
        """As `Storage.delete_files`: batches of 100 with a condition in each part, 16 at once; an interrupt cancels
        them. Single deletions on emulators, which know no batches."""
        result = DeletedFiles()

        async def work() -> None:
            if self._fs.delete_slots is None:
                self._fs.delete_slots = asyncio.Semaphore(DELETE_JOBS)
            slots, rest = self._fs.delete_slots, await self._try_batches(files, result)
            todo = iter(
                spread([rest[start : start + BATCH_SIZE] for start in range(0, len(rest), BATCH_SIZE)], DELETE_JOBS)
            )

            async def delete_some() -> None:
                for part in todo:
                    async with slots:
                        if result.changed or (stop is not None and stop.is_set()):
                            result.unfinished += len(part)
                            continue
                        await self._delete_part(part, result)
                    if on_done is not None:
                        on_done(len(part))

            await _run_together(delete_some, min(DELETE_JOBS, -(-len(rest) // BATCH_SIZE)))

        if files:
            self._run(work(), "")
        return result

    async def _delete_part(self, files: Sequence[FileInfo], result: DeletedFiles) -> None:
        """One batch, and again those of its deletions that the server was too busy for."""
        if not self._fs.batches_are_safe:
            await self._delete_singly(files, result)
            return
        remaining = list(files)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                remaining = await self._delete_batch(remaining, result, is_last=attempt == MAX_ATTEMPTS)
            except Exception as error:
                result.failed += [
                    translate_gcs_error(error, self.url_of(file.path), bucket=self._bucket) for file in remaining
                ]
                return
            if not remaining:
                return
            await asyncio.sleep(pause_seconds(attempt))

    async def _try_batches(self, files: Sequence[FileInfo], result: DeletedFiles) -> Sequence[FileInfo]:
        """Finds out, once, whether an emulator can be trusted with batches: asks it to delete an object (which was
        looked at, and is to go anyway) under a condition that does not hold. Returns the files that are still to do."""
        if self._fs.on_google:
            self._fs.batches_are_safe = True
        for number, file in enumerate(files):
            if self._fs.batches_are_safe is not None:
                break
            key = self._prefix + file.path
            try:
                found = await self._look(key)
                if found is None or found.generation != file.version:
                    continue
                headers, contents = await self._send_batch([(key, "1")])
                (answer,) = parse_answers(headers["Content-Type"], contents, 1)
            except Exception as error:
                if not means_no_batches(error):
                    break  # busy, or no permission: the deletions themselves will tell
                self._fs.batches_are_safe = False
                break
            if answer.status == 412:
                self._fs.batches_are_safe = True
            elif answer.status in (200, 204):
                self._fs.batches_are_safe = False
                result.count(file.size_bytes, True)
                return [*files[:number], *files[number + 1 :]]
        return files

    async def _delete_batch(self, files: Sequence[FileInfo], result: DeletedFiles, *, is_last: bool) -> list[FileInfo]:
        """Sends one batch, counts what became of it; returns what is worth another try."""
        headers, contents = await self._send_batch([(self._prefix + file.path, file.version) for file in files])
        was_repeated = FAILED_TRIES.get() > 0
        again: list[FileInfo] = []
        for file, answer in zip(files, parse_answers(headers["Content-Type"], contents, len(files)), strict=True):
            match answer.status:
                case 200 | 204:
                    result.count(file.size_bytes, True)
                case 404:
                    result.count(file.size_bytes, was_repeated)
                case 412 if was_repeated and await self._look(self._prefix + file.path) is None:
                    result.count(file.size_bytes, True)  # the condition does not hold: the first try did the work
                case 412:
                    result.changed.append(file.path)
                case 0 | 408 | 429 | 500 | 502 | 503 | 504 if not is_last:
                    again.append(file)
                case status:
                    result.failed.append(part_error(status, answer.message, self.url_of(file.path)))
        return again

    async def _send_batch(self, keys: Sequence[tuple[str, str]]) -> tuple[Mapping[str, str], bytes]:
        boundary = f"snapctl-{random.getrandbits(64):016x}"
        return await self._call(
            "POST",
            self._fs.batch_url_base,
            headers={"Content-Type": f'multipart/mixed; boundary="{boundary}"'},
            data=format_deletions(self._bucket, keys, parameters=self._fs._get_params({}), boundary=boundary),
        )

    async def _delete_singly(self, files: Sequence[FileInfo], result: DeletedFiles) -> None:
        todo = iter(files)

        async def delete_some() -> None:
            for file in todo:
                try:
                    result.count(file.size_bytes, await self._delete_object(self._prefix + file.path, file.version))
                except FileExistsError:
                    result.changed.append(file.path)
                except Exception as error:
                    result.failed.append(translate_gcs_error(error, self.url_of(file.path), bucket=self._bucket))

        await _run_together(delete_some, SINGLE_JOBS)


async def _run_together(work: Callable[[], Coroutine[Any, Any, None]], jobs: int) -> None:
    """Runs the same work several times at once; if one fails or all are cancelled, none is left running."""
    tasks = [asyncio.ensure_future(work()) for _ in range(jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

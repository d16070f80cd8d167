"""How the ranks of a save agree: over the store of ``torch.distributed``, never through its collectives.

A collective cannot be left again: when one rank fails in the middle of a save, the others would sit in a barrier until
the timeout of the process group (half an hour). Here every wait looks at the same time for the failure of another rank
and for its signs of life, and none lasts longer than the ranks' patience.

`Ranks` stands for the one rank of a job that is not distributed, `StoreRanks` for one of several. Both can stand in
for torchsnapshot's ``PGWrapper``.
"""

from __future__ import annotations

import concurrent.futures
import pickle
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from snapctl.errors import SaveError

PART_BYTES = 4 << 20
"""The TCPStore drops a client that sends a value of more than 8 MiB."""
COMPRESS_BYTES = 4096
LONGEST_PAUSE_SECONDS = 0.02
LONGEST_BEAT_SECONDS = 1.0
LINGER_SECONDS = 10.0
"""How long rank 0 waits at the end for the others to have heard the last word."""
_TEXT_LENGTH = 2000


class Ranks:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world_size

    def meet(self, step: int | str, path: str) -> str:
        """Waits until every rank saves the same step, or is about to do the same thing.

        Args:
            step: the step that is saved; or in words what is to be done (``restore``).

        Returns:
            The path of rank 0, which is what all of them use.

        Raises:
            SaveError: a rank did not come, or came for another step.
        """
        return path

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank; only on rank 0, None on the others, which do not wait."""
        return [value]

    def share(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def barrier(self) -> None:
        self.share(self.gather(None) and None)

    def all_gather_object(self, obj_list: list[Any], obj: Any) -> None:
        obj_list[:] = self.share(self.gather(obj))

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> None:
        if src != 0:
            raise ValueError("only rank 0 can be heard by all")
        obj_list[:] = self.share(obj_list)

    @property
    def failure(self) -> SaveError | None:
        """What another rank has said to have ended the save, as far as it is known here."""
        return None

    def check(self) -> None:
        """Raises `failure`, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException, *, unknown: bool = False) -> None:
        """Tells the others that the save has failed on this rank.

        Args:
            unknown: the manifest may have been written all the same.
        """

    def leave(self) -> None:
        """Nothing more will be said or asked. On rank 0 it waits for the others to have heard the last word."""


def describe(error: BaseException) -> str:
    """An error in one line, with its type where it is not one of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SaveError) else f"{type(error).__name__}: {text}" if text else repr(error)


class StoreRanks(Ranks):
    """One rank of several, for one save."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            store: a ``torch.distributed.Store`` that all ranks share. It must be this object's own connection, since a
                store serves one request at a time.
            patience_seconds: a rank that gives no sign of life for so long is taken for dead.
        """
        self.rank = rank
        self.world_size = world_size
        self._patience = patience_seconds
        self._clock = clock
        self._sleep = sleep
        self._prefix = ""
        self._rounds = 0
        self._failure: SaveError | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._next_look = 0.0
        beat = min(LONGEST_BEAT_SECONDS, patience_seconds / 6)
        self._messenger = _Messenger(store, patience_seconds, beat, self._beat)
        self._beats = 0

    # -- the store -----------------------------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any) -> Any:
        return self._messenger.ask(method, *args)

    def _put(self, key: str, value: Any) -> None:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        packed = len(data) > COMPRESS_BYTES
        if packed:
            data = zlib.compress(data, 1)
        parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
        for number, part in enumerate(parts[1:], 1):
            self._ask("set", f"{key}+{number}", part)
        # The first part stands under the key itself, and comes last: whoever sees it finds all of them.
        self._ask("set", key, b"%d:%d:" % (len(parts), packed) + parts[0])

    def _take(self, key: str) -> Any:
        first: bytes = self._ask("get", key)
        count, packed, data = first.split(b":", 2)
        data = b"".join((data, *(self._ask("get", f"{key}+{number}") for number in range(1, int(count)))))
        return pickle.loads(zlib.decompress(data) if int(packed) else data)  # noqa: S301 - from a rank of this job

    def _forget(self, key: str) -> None:
        first: bytes = self._ask("get", key)
        for number in range(1, int(first.split(b":", 1)[0])):
            self._ask("delete_key", f"{key}+{number}")
        self._ask("delete_key", key)

    def _find(self, key: str) -> Any:
        return self._take(key) if self._ask("check", [key]) else None

    # -- coming together -----------------------------------------------------------------------------------------

    def meet(self, step: int | str, path: str) -> str:
        if self.rank == 0:
            return self._await_all(step, path)
        return self._join(step, path)

    def _await_all(self, step: int | str, path: str) -> str:
        """Rank 0 gives this save a fresh name, and goes on when every rank has said hello for it."""
        name = uuid.uuid4().hex
        last = self._find("save")
        answered: Mapping[int, str] = last["nonces"] if last is not None else {}
        came: dict[int, tuple[str, int | str]] = {}
        missing = set(range(1, self.world_size))
        for pause in self._pauses(self._patience):
            for rank in sorted(missing):
                hello = self._find(f"hello/{rank}")
                if hello and hello[0] != answered.get(rank):  # else it is about to take its answer from there
                    came[rank] = hello
            missing -= came.keys()
            if not missing or pause is None:
                break
        nonces = {rank: nonce for rank, (nonce, _) in came.items()}
        others = {rank: theirs for rank, (_, theirs) in came.items() if theirs != step}
        error = None
        if missing:
            who = _ranks(sorted(missing))
            error = SaveError(
                f"{who} did not come to {_purpose(step)} within {self._patience:g} s", ranks=tuple(sorted(missing))
            )
        elif others:
            rank, theirs = next(iter(sorted(others.items())))
            error = SaveError(f"rank {rank} {_does(theirs)} while rank 0 {_does(step)}", ranks=tuple(others))
        self._put("save", {"name": name, "nonces": nonces, "path": path, "error": error and (str(error), error.ranks)})
        if error is not None:
            raise error
        self._begin(name)
        return path

    def _join(self, step: int | str, path: str) -> str:
        nonce = uuid.uuid4().hex
        self._put(f"hello/{self.rank}", (nonce, step))
        try:
            for pause in self._pauses(self._patience * 1.1 + 1):  # rank 0 may tell who else is missing
                save = self._find("save")
                if save is not None and save["nonces"].get(self.rank) == nonce:
                    break
                if pause is None:
                    raise SaveError(f"rank 0 did not come to {_purpose(step)} within {self._patience:g} s", ranks=(0,))
        finally:
            self._put(f"hello/{self.rank}", None)  # an old hello must never be taken for a new one
        if save["error"] is not None:
            message, ranks = save["error"]
            raise SaveError(message, ranks=ranks)
        self._begin(save["name"])
        return str(save["path"])

    def _pauses(self, seconds: float) -> Iterator[float | None]:
        """Sleeps between attempts; the last one is None."""
        end = self._clock() + seconds
        pause = 0.0005
        while self._clock() < end:
            yield pause
            self._sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        yield None

    def _begin(self, name: str) -> None:
        self._prefix = f"{name}/"
        self._messenger.beat_now()

    # -- talking -------------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any] | None:
        self.check()
        self._rounds += 1
        base = f"{self._prefix}{self._rounds}"
        if self.rank != 0:
            self._put(f"{base}/{self.rank}", value)
            return None
        keys = {rank: f"{base}/{rank}" for rank in range(1, self.world_size)}
        self._await_keys(keys)
        values = [value]
        for key in keys.values():
            values.append(self._take(key))
            self._forget(key)
        return values

    def share(self, value: Any) -> Any:
        self.check()
        self._rounds += 1
        key = f"{self._prefix}{self._rounds}/all"
        if self.rank == 0:
            self._put(key, value)
            return value
        self._await_keys({0: key})
        return self._take(key)

    def _await_keys(self, keys: Mapping[int, str]) -> None:
        """Until every rank of `keys` has written its key.

        Raises:
            SaveError: a rank has failed meanwhile, or is silent.
        """
        pause = 0.0005
        while not self._ask("check", list(keys.values())):
            self._look_for_failure()
            self._look_for_life(keys)
            self._sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)

    def _look_for_life(self, keys: Mapping[int, str]) -> None:
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + min(LONGEST_BEAT_SECONDS, self._patience / 6)
        silent: list[int] = []
        for rank, key in keys.items():
            if self._ask("check", [key]):
                continue
            alive_key = f"{self._prefix}alive/{rank}"
            sign: bytes = self._ask("get", alive_key) if self._ask("check", [alive_key]) else b""
            known = self._seen.get(rank)
            if known is None or known[0] != sign:
                self._seen[rank] = (sign, now)
            elif now - known[1] > self._patience:
                silent.append(rank)
        if silent:
            raise SaveError(f"{_ranks(silent)} gave no sign of life for {self._patience:g} s", ranks=tuple(silent))

    # -- failing -------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> SaveError | None:
        return self._failure

    def _look_for_failure(self) -> None:
        if self._failure is None and (found := self._find(f"{self._prefix}failed")) is not None:
            self._hear(*found)
        self.check()

    def _hear(self, text: str, ranks: tuple[int, ...], unknown: bool) -> None:
        self._failure = SaveError(text, ranks=ranks, unknown=unknown)

    def fail(self, error: BaseException, *, unknown: bool = False) -> None:
        if error is self._failure:
            return  # the others know: one of them said it
        if isinstance(error, SaveError) and error.ranks:
            record = (str(error)[:_TEXT_LENGTH], error.ranks, unknown)
        else:
            record = (f"rank {self.rank}: {describe(error)}"[:_TEXT_LENGTH], (self.rank,), unknown)
        try:
            if self._prefix:
                self._put(f"{self._prefix}failed", record)
        except SaveError:
            return  # nobody can be told: they will notice the silence

    def _beat(self, store: Any) -> None:
        """A sign of life, and a look for bad news; runs in the messenger's thread."""
        if not self._prefix:
            return
        self._beats += 1
        store.set(f"{self._prefix}alive/{self.rank}", str(self._beats))
        key = f"{self._prefix}failed"
        if self._failure is None and store.check([key]):
            data = store.get(key).split(b":", 2)[2]  # too short to have been packed or cut
            self._hear(*pickle.loads(data))  # noqa: S301 - from a rank of this job

    def leave(self) -> None:
        """Rank 0 waits a little for the others: its process may take the store with it."""
        try:
            if not self._prefix:
                return
            key = f"{self._prefix}left"
            if self.rank != 0:
                self._ask("add", key, 1)
                return
            for pause in self._pauses(min(LINGER_SECONDS, self._patience)):
                if self._ask("add", key, 0) >= self.world_size - 1:
                    break
                if pause is None:
                    return  # what was said stays, for whoever comes late
            for number in range(self._rounds + 1):
                self._forget_if_there(f"{self._prefix}{number}/all")
            for rank in range(self.world_size):
                self._ask("delete_key", f"{self._prefix}alive/{rank}")
            self._forget_if_there(f"{self._prefix}failed")
            self._ask("delete_key", key)
        except SaveError:
            return  # the store is gone: nothing is left to tidy
        finally:
            self._messenger.stop()

    def _forget_if_there(self, key: str) -> None:
        if self._ask("check", [key]):
            self._forget(key)


class RootOnly:
    """`Ranks` for code that gathers on all ranks and looks at the result on rank 0 alone.

    It saves the way back: with many ranks, all entries of all ranks to each of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def all_gather_object(self, obj_list: list[Any], obj: Any) -> None:
        gathered = self._ranks.gather(obj)
        obj_list[:] = gathered if gathered is not None else [obj] * self._ranks.world_size


class _Messenger:
    """Asks the store in a thread of its own.

    A store whose host is frozen or off the net may never answer, and nobody shall wait for it longer than the ranks'
    patience. Between the questions it gives the signs of life.
    """

    def __init__(self, store: Any, patience_seconds: float, beat_seconds: float, beat: Callable[[Any], None]) -> None:
        self._store = store
        self._patience = patience_seconds
        self._beat_seconds = beat_seconds
        self._beat = beat
        self._questions: queue.SimpleQueue[tuple[str, Sequence[Any], concurrent.futures.Future[Any]] | None]
        self._questions = queue.SimpleQueue()
        threading.Thread(target=self._run, name="snapctl-ranks", daemon=True).start()

    def ask(self, method: str, *args: Any) -> Any:
        """What the store answers.

        Raises:
            SaveError: it does not, or it is gone.
        """
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._questions.put((method, args, answer))
        try:
            return answer.result(self._patience)
        except concurrent.futures.TimeoutError:
            raise SaveError(f"the store of the ranks gave no answer for {self._patience:g} s") from None
        except Exception as error:  # whatever a store raises: torch has no type for it
            raise SaveError(f"the store of the ranks is gone: {describe(error)}") from error

    def beat_now(self) -> None:
        self.ask("beat")

    def stop(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            try:
                question = self._questions.get(timeout=max(0.0, next_beat - time.monotonic()))
            except queue.Empty:
                question = ("beat", (), concurrent.futures.Future())
            if question is None:
                return
            method, args, answer = question
            try:
                if method == "beat" or time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._beat_seconds
                    self._beat(self._store)
                answer.set_result(None if method == "beat" else getattr(self._store, method)(*args))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                answer.set_exception(error)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:20]) + (", …" if len(ranks) > 20 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _purpose(step: int | str) -> str:
    return step if isinstance(step, str) else f"save step {step}"


def _does(step: int | str) -> str:
    return f"is about to {step}" if isinstance(step, str) else f"saves step {step}"

"""From what is typed to what is meant."""

from __future__ import annotations

from typing import Any

import pytest

from snapctl.entry_names import EntryIndex, find_entries, nearest_names
from snapctl.errors import EntryNotFoundError
from snapctl.manifest import parse_manifest
from tests.support.snapshots import encode, metadata, primitive, tensor_entry

KEYS = ["a/b", "50%", "a%2Fb", "x.y.z", "sp ace", "", "0", "00", "-1", "ü", "[bold]x[/bold]", "w[0].k", "*"]


def _index(entries: dict[str, Any], world: int = 2) -> EntryIndex:
    return EntryIndex(parse_manifest(metadata(entries, world)))


def _sharded(*offsets: int) -> dict[str, Any]:
    shards = [{"offsets": [o], "sizes": [2], "tensor": tensor_entry(f"s/{o}", [2])} for o in offsets]
    return {"type": "ShardedTensor", "shards": shards}


INDEX = _index(
    {
        "0/m": {"type": "dict", "keys": ["emb.weight", "rep", "own", "d", "rng"]},
        "1/m": {"type": "dict", "keys": ["emb.weight", "rep", "own", "d", "rng", "only1"]},
        "0/m/emb.weight": _sharded(0),
        "1/m/emb.weight": _sharded(2),
        "0/m/rep": tensor_entry("replicated/m/rep", [2], replicated=True),
        "0/m/own": tensor_entry("0/m/own", [2]),
        "1/m/own": tensor_entry("1/m/own", [2]),
        "0/m/rng": tensor_entry("0/m/rng", [2]),
        "1/m/rng": tensor_entry("1/m/rng", [3]),
        "1/m/only1": _sharded(0, 2),
        "1/m/dense1": tensor_entry("1/m/dense1", [2]),
        "0/m/d": {"type": "DTensor", "shards": [_sharded(0)["shards"][0]], "mesh": [0, 1], "dim_map": [[-1]]},
        "0/extra": {"type": "dict", "keys": ["step"]},
        "0/extra/step": primitive(3),
        "1/extra/step": primitive(3),
        "0/opt.emb.weight/m": tensor_entry("0/opt", [2]),
    }
)


def _paths(name: str, rank: int | None = None, index: EntryIndex = INDEX) -> list[str]:
    return [entry.entries[0][0] for entry in find_entries(index, name, rank=rank).entries]


def _error(name: str, rank: int | None = None, index: EntryIndex = INDEX) -> EntryNotFoundError:
    with pytest.raises(EntryNotFoundError) as caught:
        find_entries(index, name, rank=rank)
    return caught.value


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("0/m/emb.weight", "0/m/emb.weight"),
        ("1/m/emb.weight", "0/m/emb.weight"),  # the whole of it, whichever rank is named
        ("m/emb.weight", "0/m/emb.weight"),
        ("1/m/rep", "0/m/rep"),
        ("1/m/d", "0/m/d"),
        ("0/m/only1", "1/m/only1"),
        ("1/m/own", "1/m/own"),
        ("extra/step", "0/extra/step"),
        ("m/rep", "0/m/rep"),
        ("rep", "0/m/rep"),
        ("weight", "0/m/emb.weight"),
        ("emb.weight", "0/m/emb.weight"),
        ("*mb.w*ht", "0/m/emb.weight"),
    ],
)
def test_a_name_is_found_by_the_first_step_that_hits(name: str, found: str) -> None:
    assert _paths(name) == [found]


def test_a_rank_narrows_what_each_rank_holds_by_itself() -> None:
    assert _paths("m/own", rank=1) == ["1/m/own"]
    assert _paths("m/rng", rank=1) == ["1/m/rng"]
    assert _paths("m/emb.weight", rank=1) == ["0/m/emb.weight"]
    assert _paths("0/m/rng", rank=0) == ["0/m/rng"]
    assert _error("0/m/rng", rank=1).message == "0/m/rng: no such entry on rank 1"
    assert (
        _error("m/dense1", rank=0).candidates == ("m/own",) or "m/dense1" not in _error("m/dense1", rank=0).candidates
    )


def test_tensors_of_all_ranks_come_back_together_where_only_their_bytes_can_tell_them_apart() -> None:
    (entry,) = find_entries(INDEX, "m/own").entries
    assert [path for path, _ in entry.entries] == ["0/m/own", "1/m/own"]


def test_different_tensors_of_several_ranks_are_never_picked_from() -> None:
    error = _error("m/rng")
    assert error.candidates == ("0/m/rng", "1/m/rng")
    assert "--rank" in str(error.hint)


def test_a_rank_that_did_not_save_is_none() -> None:
    assert _error("7/m/rep").message == "7/m/rep: no such entry"


def test_several_ends_are_candidates() -> None:
    index = _index({"0/a/x.weight": tensor_entry("p", [1]), "0/b/x.weight": tensor_entry("q", [1])})
    assert _error("x.weight", index=index).candidates == ("a/x.weight", "b/x.weight")
    assert _error("weight", index=index).message == "weight: 2 entries fit: a/x.weight, b/x.weight"


def test_an_end_begins_after_a_dot_or_a_slash_only() -> None:
    error = _error("eight")
    assert error.message == "eight: no such entry"


def test_a_container_is_said_to_be_one_with_the_glob_for_what_is_in_it() -> None:
    error = _error("extra")
    assert error.message == "extra: is a dict of 1 entries, not one"
    assert error.hint == "'extra/*' for all of them"
    assert error.candidates == ("extra/step",)
    assert _error("0/extra/").hint == "'extra/*' for all of them"


def test_the_nearest_names_are_told() -> None:
    error = _error("m/emb.wieght")
    assert error.candidates[0] == "m/emb.weight"
    assert "m/emb.weight" in str(error.hint)
    assert _error("zzz").candidates == ()


def test_the_nearest_of_very_many_names_are_found_by_their_words() -> None:
    names = [f"model/layers.{n}.mlp.weight" for n in range(50_000)] + ["model/embedding.table"]
    assert nearest_names("0/model/embedding.tabel", names)[0] == "model/embedding.table"


# -- globs -----------------------------------------------------------------------------------------------------------


def test_a_glob_takes_all_that_fit_and_never_a_container() -> None:
    match = find_entries(INDEX, "m/*", rank=1)
    assert match.is_glob
    keys = ["emb.weight", "rep", "own", "rng", "only1", "dense1", "d"]
    assert [entry.path for entry in match.entries] == [f"m/{key}" for key in keys]
    assert _paths("m/*", rank=0) == ["0/m/emb.weight", "0/m/rep", "0/m/own", "0/m/rng", "0/m/d"]


def test_a_glob_with_a_rank_in_it_takes_what_that_rank_holds() -> None:
    assert _paths("1/m/*") == _paths("m/*", rank=1)


def test_a_glob_says_what_differs_from_rank_to_rank() -> None:
    match = find_entries(INDEX, "m/r*")
    assert [entry.path for entry in match.entries] == ["m/rep"]
    ((first, second),) = match.ambiguous
    assert (first.entries[0][0], second.entries[0][0]) == ("0/m/rng", "1/m/rng")


def test_a_glob_that_fits_nothing_is_an_error() -> None:
    assert _error("x/*").message == "x/*: no such entry"


# -- keys ------------------------------------------------------------------------------------------------------------


def _keys_index() -> EntryIndex:
    entries: dict[str, Any] = {f"0/m/{encode(key)}": tensor_entry(f"b/{n}", [n + 1]) for n, key in enumerate(KEYS)}
    entries["0/m"] = {"type": "dict", "keys": KEYS}
    for n in (0, 1):
        entries[f"0/opt/state/{n}/exp_avg"] = tensor_entry(f"o/{n}", [50 + n])
    return _index(entries, 1)


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_any_key_is_found_by_its_manifest_path_and_by_its_path(number: int) -> None:
    path = f"m/{encode(KEYS[number])}"
    for name in (f"0/{path}", path):
        (entry,) = find_entries(_keys_index(), name).entries
        assert entry.shape == (number + 1,)


@pytest.mark.parametrize(
    ("name", "number"), [("m/a/b", 0), ("0/m/a/b", 0), ("m/50%", 1), ("m/a%2Fb", 0), ("m/a%252Fb", 2), ("m/*", 12)]
)
def test_a_plain_key_is_found_where_the_manifest_has_no_such_path(name: str, number: int) -> None:
    (entry,) = find_entries(_keys_index(), name).entries
    assert entry.shape == (number + 1,)


def test_a_key_with_a_slash_and_two_keys_that_read_alike_are_not_picked_from() -> None:
    index = _index({"0/m/a%2Fb%25": tensor_entry("p", [1]), "0/m%2Fa/b%25": tensor_entry("q", [1])}, 1)
    assert _error("m/a/b%", index=index).candidates == ("m/a%2Fb%25", "m%2Fa/b%25")


def test_integer_keys_of_an_optimizer_are_part_of_the_path() -> None:
    (entry,) = find_entries(_keys_index(), "opt/state/1/exp_avg").entries
    assert entry.shape == (51,)
    assert len(find_entries(_keys_index(), "opt/state/*/exp_avg").entries) == 2
    assert _error("exp_avg", index=_keys_index()).candidates == ("opt/state/0/exp_avg", "opt/state/1/exp_avg")

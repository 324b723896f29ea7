"""The shared tier between two machines, over a folder and obstore's memory store; `test_fleet_faults` has SeaweedFS."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storekit
from fleetkit import (
    CHAT,
    FINGERPRINT,
    KEY,
    PREFIX,
    delete_object,
    listed,
    machine,
    publish,
    read_object,
    settle,
    tokens,
    wait_for,
    write_object,
)

from kvstore import InvalidInputError, RemoteKeyError, RemoteMatch, Store
from kvstore.fleet.names import parse_path

_numbers = itertools.count()


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket" if request.param == "folder" else f"memory://fleet-{next(_numbers)}"


@pytest.fixture
def a(tmp_path: Path, url: str) -> Iterator[Store]:
    with machine(tmp_path, "a", url) as store:
        yield store


def names(url: str) -> list[Any]:
    found = [parse_path(path) for path in listed(url)]
    assert None not in found
    return found


def same(saved: Any, values: Any) -> bool:
    return bool(np.array_equal(saved.tokens, tokens(values))) and saved.main.tobytes() == storekit.state(values)


# -- publish, look up, fetch


def test_what_one_machine_publishes_another_fetches_byte_for_byte(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned", excerpt="a system prompt")
    with machine(tmp_path, "b", url) as b:
        request = tokens([*PREFIX, 1, 2, 3])
        assert b.match(request) is None
        match = b.remote_match(request)
        assert match is not None
        assert (match.n_common, match.n_saved) == (300, 300)
        assert match.n_bytes == sum(listed(url).values())
        assert 0 <= match.age < 600
        saved = b.fetch(match, 60)
        assert same(saved, PREFIX)
        settle(b)
        local = b.match(request)
        assert local is not None
        assert (local.n_common, local.entry.entry_class, local.entry.excerpt) == (300, "learned", "a system prompt")
        kept = b.get(local.entry.id)
        assert same(kept, PREFIX)


def test_a_second_chat_travels_as_a_delta_and_brings_its_parent(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    publish(a, CHAT)
    parent, child = sorted(names(url), key=lambda name: name.n_tokens)
    assert not parent.is_delta
    assert (child.parent, child.parent_tokens) == (parent.state, 300)
    sizes = listed(url)
    assert sizes[child.path] < len(storekit.state(CHAT)) * 0.6
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert match.n_bytes == sum(sizes.values())
        assert same(b.fetch(match, 60), CHAT)
        settle(b)
        local = b.match(tokens(CHAT))
        assert local is not None
        assert local.entry.parent is not None, "the parent was fetched, so the chat is stored against it"
        assert b.remote is not None
        assert b.remote.metrics()["remote_fetches_total"] == 1
    # A machine that has the parent moves the delta alone.
    with machine(tmp_path, "c", url) as c:
        prefix = c.remote_match(tokens(PREFIX))
        assert prefix is not None
        assert c.fetch(prefix, 60) is not None
        settle(c)
        match = c.remote_match(tokens(CHAT), n_local=300)
        assert match is not None
        assert match.n_bytes == sizes[child.path]
        assert same(c.fetch(match, 60), CHAT)


def test_a_chat_that_parts_is_served_up_to_a_mark_and_with_longest_to_the_last_common_token(
    tmp_path: Path, url: str, a: Store
) -> None:
    publish(a, CHAT)
    with machine(tmp_path, "b", url, publish="none") as b:
        request = [*CHAT[:410], 1, 2, 3]
        match = b.remote_match(tokens(request))
        assert match is not None
        assert match.n_common == 384
        saved = b.fetch(match, 60)
        assert saved is not None
        assert np.array_equal(saved.tokens, tokens(CHAT[:384]))
        saved = b.fetch(match, 60, longest=True)
        assert saved is not None
        assert np.array_equal(saved.tokens, tokens(CHAT[:410]))


def test_a_state_that_cannot_be_cut_serves_only_as_a_whole(tmp_path: Path, url: str, a: Store) -> None:
    values = list(range(200))
    a.put(tokens(values), storekit.recurrent_state(200), entry_class="learned")
    settle(a)
    assert [name.kind for name in names(url)] == ["L"]
    with machine(tmp_path, "b", url) as b:
        assert b.remote_match(tokens([*values[:192], 9, 9])) is None
        match = b.remote_match(tokens([*values, 9, 9]))
        assert match is not None
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.main.tobytes() == storekit.recurrent_state(200)


def test_a_draft_travels_with_its_main(tmp_path: Path, url: str, a: Store) -> None:
    for values, entry_class in ((PREFIX, "learned"), (CHAT, "normal")):
        a.put(tokens(values), storekit.state(values), draft=storekit.state(values, row=32), entry_class=entry_class)
        settle(a)
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.draft is not None
        assert saved.draft.tobytes() == storekit.state(CHAT, row=32)


def test_only_more_than_the_local_match_is_offered(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", url) as b:
        request = tokens([*PREFIX, 1])
        assert b.remote_match(request, n_local=300) is None
        match = b.remote_match(request, n_local=299)
        assert match is not None
        assert match.n_saved == 1
        with pytest.raises(InvalidInputError):
            b.remote_match(request, n_local=302)


def test_another_fingerprint_or_key_sees_nothing(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    for name, options in (("b", {"fingerprint": "another"}), ("c", {"remote_key": bytes(32)})):
        with machine(tmp_path, name, url, **options) as other:
            assert other.remote_match(tokens(PREFIX)) is None


def test_a_machine_with_two_keys_reads_both_and_publishes_under_the_new_one(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    new = b"the new key of the fleet, random"
    with machine(tmp_path, "b", url, remote_key=[new, KEY]) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert same(b.fetch(match, 60), PREFIX)
        publish(b, range(400), entry_class="learned")
    with machine(tmp_path, "c", url, remote_key=new) as c:
        assert c.remote_match(tokens(range(400))) is not None
        assert c.remote_match(tokens(PREFIX)) is None


# -- what is published


def test_publish_decides_which_entries_travel(tmp_path: Path, url: str) -> None:
    for mode, n in (("none", 0), ("learned", 2), ("all", 3)):
        at = url + f"/{mode}" if url.startswith("file") else f"{url}-{mode}"
        with machine(tmp_path, mode, at, publish=mode) as store:
            publish(store, range(100), entry_class="learned")
            publish(store, range(1000, 1100), entry_class="pinned")
            publish(store, range(2000, 2100))
            publish(store, range(3000, 3063), entry_class="learned")  # too short
        assert len(names(at)) == n


def test_what_is_learned_or_pinned_later_is_published(tmp_path: Path, url: str) -> None:
    with machine(tmp_path, "a", url, publish="learned") as store:
        first = store.put(tokens(CHAT), storekit.state(CHAT))
        second = store.put(tokens(range(100)), storekit.state(range(100)))
        settle(store)
        assert listed(url) == {}
        store.learn(first.id, 300)
        store.set(second.id, entry_class="pinned")
        settle(store)
    assert sorted((name.kind, name.n_tokens) for name in names(url)) == [("l", 300), ("p", 100)]


def test_what_was_learned_while_nobody_listened_is_published_at_the_next_open(tmp_path: Path, url: str) -> None:
    with Store(tmp_path / "a.kvstore", fingerprint=FINGERPRINT) as alone:
        alone.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
    with machine(tmp_path, "a", url, publish="learned") as store:
        wait_for(lambda: store.remote is not None and store.remote.metrics()["remote_published_total"] == 1)
    assert [name.n_tokens for name in names(url)] == [300]


def test_a_write_behind_store_publishes_too(tmp_path: Path, url: str) -> None:
    with machine(tmp_path, "a", url, write_behind=True) as store:
        publish(store, PREFIX, entry_class="learned")
        publish(store, CHAT)
    assert sorted(name.n_tokens for name in names(url)) == [300, 500]
    with machine(tmp_path, "b", url, write_behind=True) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert same(b.fetch(match, 60), CHAT)
        settle(b)
        assert b.match(tokens(CHAT)) is not None


def test_what_was_fetched_is_not_published_again(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    before = listed(url)
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert b.fetch(match, 60) is not None
        settle(b)
        b.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
        settle(b)
    assert listed(url) == before


def test_a_full_queue_drops_the_entry_with_the_least_tokens() -> None:
    from kvstore.fleet.uploads import LENGTH, UploadQueue, Waiting

    queue = UploadQueue()
    for n in (500, *range(100, 100 + LENGTH)):
        queue.add(Waiting(n, n, "learned"))
    taken = [queue.take() for _ in range(LENGTH)]
    assert [each.id for each in taken if each is not None] == [500, *range(101, 100 + LENGTH)]
    assert queue.take() is None


def test_a_learned_base_is_published_before_the_chat_that_is_stored_against_it(tmp_path: Path, url: str) -> None:
    with Store(tmp_path / "a.kvstore", fingerprint=FINGERPRINT, min_saved_mib=0) as alone:
        alone.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
        chat = alone.put(tokens(CHAT), storekit.state(CHAT))
        assert chat.parent is not None
    with machine(tmp_path, "a", url, publish="none") as store:
        assert store.remote is not None
        found = store.remote.push(chat.id)
        assert found is not None
        assert found.name.parent_tokens == 300
    assert sorted(name.n_tokens for name in names(url)) == [300, 500]


def test_a_chain_of_deltas_travels_as_one_delta_against_its_nearest_whole_published_ancestor(tmp_path: Path, url: str) -> None:
    """Each turn of a chat is stored against the turn before it; what travels is decoded, and encoded against the prefix."""
    turns = [CHAT, [*CHAT, *range(7000, 7100)], [*CHAT, *range(7000, 7300)]]
    with Store(tmp_path / "a.kvstore", fingerprint=FINGERPRINT, min_saved_mib=0) as alone:
        learned = alone.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
        entries = [alone.put(tokens(turn), storekit.state(turn)) for turn in turns]
        assert entries[-1].parent not in (None, learned.id), "against the turn before it"
    with machine(tmp_path, "a", url, publish="none") as store:
        assert store.remote is not None
        found = store.remote.push(entries[-1].id)
        assert found is not None
        assert (found.name.n_tokens, found.name.parent_tokens) == (800, 300)
    assert sorted((name.n_tokens, name.is_delta) for name in names(url)) == [(300, False), (800, True)]
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(turns[-1]))
        assert match is not None
        assert same(b.fetch(match, 60), turns[-1])


# -- the index


def test_names_that_are_gone_leave_the_index_at_the_next_full_listing(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", url) as b:
        assert b.remote is not None
        assert b.remote_match(tokens(PREFIX)) is not None
        for path in listed(url):
            delete_object(url, path)
        b.remote.poll()
        assert b.remote_match(tokens(PREFIX)) is not None
        b.remote.poll(full=True)
        assert b.remote_match(tokens(PREFIX)) is None


def test_full_listings_of_two_processes_that_overlap_lose_no_name(tmp_path: Path, url: str, a: Store) -> None:
    """Both share the index beside the store. The first listing takes its page after the second one has taken it."""
    from kvstore.fleet.index import Listed, RemoteIndex
    from kvstore.fleet.names import Names
    from kvstore.storage.remote_file import RemoteFile

    publish(a, PREFIX, entry_class="learned")
    page = [Listed(path, size, 1) for path, size in listed(url).items()]
    names = Names(KEY, FINGERPRINT)
    first, second = (RemoteIndex(RemoteFile(str(tmp_path / "index")), [names]) for _ in range(2))
    one = first.begin_listing(names)
    two = second.begin_listing(names)
    second.take(names, page)
    first.take(names, page)
    assert second.end_listing(names, two, 0) == 0
    assert first.end_listing(names, one, 0) == 0
    assert len(first.all(names)) == 1
    for index in (first, second):
        index.file.close()


def test_a_miss_makes_the_next_poll_find_what_was_published_since(tmp_path: Path, url: str, a: Store) -> None:
    with machine(tmp_path, "b", url) as b:
        assert b.remote_match(tokens(PREFIX)) is None
        publish(a, PREFIX, entry_class="learned")
        wait_for(lambda: b.remote_match(tokens(PREFIX)) is not None)


def test_the_index_lives_beside_the_store_and_a_damaged_one_is_made_anew(
    tmp_path: Path, url: str, a: Store, caplog: pytest.LogCaptureFixture
) -> None:
    publish(a, PREFIX, entry_class="learned")
    for damage in (b"", b"not a database" * 500):
        with machine(tmp_path, "b", url) as b:
            assert b.remote_match(tokens(PREFIX)) is not None
        file = tmp_path / "b.kvstore-remote"
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(damage)
    with machine(tmp_path, "b", url) as b:
        assert b.remote_match(tokens(PREFIX)) is not None
    assert "made anew" in caplog.text


def test_strangers_files_are_ignored_and_counted(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    folder = path.rsplit("/", 1)[0]
    write_object(url, f"{folder}/readme.txt", b"hello")
    write_object(url, f"{folder}/000000-l-99-a-b-0-0-", b"hello")
    with machine(tmp_path, "b", url) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert same(b.fetch(match, 60), PREFIX)
        assert b.remote.metrics()["remote_ignored_total"] >= 2


# -- objects that are not what they say


def _bad_objects(good: bytes) -> dict[str, bytes]:
    middle = len(good) // 2
    return {
        "one bit changed": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "salt changed": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "cut off": good[:-1000],
        "bytes added": good + bytes(16),
        "empty": b"",
        "garbage": storekit.noise(1, len(good)),
        "zeros": bytes(len(good)),
    }


@pytest.mark.parametrize("what", list(_bad_objects(bytes(100))))
def test_an_object_that_was_changed_is_refused_once_with_its_path(
    tmp_path: Path, url: str, a: Store, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    write_object(url, path, _bad_objects(read_object(url, path))[what])
    with machine(tmp_path, "b", url, publish="none") as b, caplog.at_level(logging.WARNING):
        assert b.remote is not None
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert b.fetch(match, 60) is None
        assert b.remote_match(tokens(PREFIX)) is None, "never offered again"
        b.remote.poll()
        assert b.remote_match(tokens(PREFIX)) is None, "not even after the next listing"
        assert b.fetch(match, 60) is None
        assert b.remote.metrics()["remote_refused_total"] == 1
        assert b.match(tokens(PREFIX)) is None
    assert caplog.text.count(path) == 1


def test_an_object_that_is_put_right_is_offered_again(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    good = read_object(url, path)
    write_object(url, path, good[:-1])
    with machine(tmp_path, "b", url) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert b.fetch(match, 60) is None
        write_object(url, path, good)
        b.remote.poll()
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert same(b.fetch(match, 60), PREFIX)


def test_bytes_added_behind_an_object_whose_size_is_known_change_nothing(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        write_object(url, path, read_object(url, path) + bytes(100))
        assert same(b.fetch(match, 60), PREFIX)


def test_another_good_object_under_the_name_is_refused(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    publish(a, range(300), entry_class="learned")
    (other,) = set(listed(url)) - {path}
    write_object(url, path, read_object(url, other))
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert b.fetch(match, 60) is None


def test_a_copy_in_another_days_folder_opens(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    (path,) = listed(url)
    name = parse_path(path)
    assert name is not None
    write_object(url, name.renamed(time.time() - 3 * 86400).path, read_object(url, path))
    delete_object(url, path)
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert same(b.fetch(match, 60), PREFIX)


def test_a_refused_object_is_followed_by_the_next_candidate(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    publish(a, CHAT)
    child = max(names(url), key=lambda name: name.n_tokens)
    write_object(url, child.path, bytes(listed(url)[child.path]))
    with machine(tmp_path, "b", url) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert match.n_common == 500
        saved = b.fetch(match, 60)
        assert same(saved, PREFIX), "the prefix is the next best"
        assert b.remote.metrics()["remote_refused_total"] == 1


def test_a_parent_that_is_gone_makes_its_children_a_miss(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    publish(a, CHAT)
    parent = min(names(url), key=lambda name: name.n_tokens)
    with machine(tmp_path, "b", url) as b:
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        delete_object(url, parent.path)
        assert b.fetch(match, 60) is None
        assert b.remote_match(tokens(CHAT)) is None
        assert b.remote is not None
        assert b.remote.metrics()["remote_refused_total"] == 0
    with machine(tmp_path, "c", url) as c:
        assert c.remote_match(tokens(CHAT)) is None, "known without a request"


def test_a_damaged_parent_is_refused_and_not_its_child(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    publish(a, CHAT)
    parent, child = sorted(names(url), key=lambda name: name.n_tokens)
    good = read_object(url, parent.path)
    write_object(url, parent.path, good[:-1])
    with machine(tmp_path, "b", url) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert b.fetch(match, 60) is None
        write_object(url, parent.path, good)
        b.remote.poll()
        match = b.remote_match(tokens(CHAT))
        assert match is not None
        assert match.path == child.path
        assert same(b.fetch(match, 60), CHAT)


# -- arguments


@pytest.mark.parametrize(
    "options",
    [
        {"remote": "nowhere"},
        {"remote": "ftp://x/y"},
        {"remote": "s3://"},
        {"remote": "file://"},
        {"remote": "s3://key:secretvalue@bucket/x"},
        {"publish": "some"},
        {"remote_options": {"poll_seconds": -1}},
        {"remote_options": {"no_such_option": "x"}},
        {"remote_options": 7},
    ],
)
def test_wrong_arguments_are_named_before_a_file_is_made(tmp_path: Path, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"remote": f"file://{tmp_path}/bucket", "remote_key": KEY, **options}
    with pytest.raises(InvalidInputError) as caught:
        Store(tmp_path / "x.kvstore", **given)
    assert "secretvalue" not in str(caught.value)
    assert not (tmp_path / "x.kvstore").exists()


@pytest.mark.parametrize("key", [None, b"short", b"x" * 65, 7, [], "/no/such/file"])
def test_a_key_is_required(tmp_path: Path, key: Any) -> None:
    with pytest.raises(RemoteKeyError):
        Store(tmp_path / "x.kvstore", remote=f"file://{tmp_path}/bucket", remote_key=key)
    assert not (tmp_path / "x.kvstore").exists()


def test_a_key_file_holds_hex_digits_or_bytes(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    file = tmp_path / "key"
    for data in (KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", KEY.hex().encode() + b"\r\n"):
        file.write_bytes(data)
        with machine(tmp_path, "b", url, remote_key=str(file)) as b:
            assert b.remote_match(tokens(PREFIX)) is not None


def test_a_store_without_a_remote_has_none(tmp_path: Path) -> None:
    with Store(tmp_path / "x.kvstore") as store:
        assert store.remote is None
        assert store.remote_match([1, 2, 3]) is None
        match = RemoteMatch(n_common=1, n_bytes=1, age=0, n_saved=1, path="1/x", tokens=tokens([1]))
        assert store.fetch(match) is None
        with pytest.raises(InvalidInputError):
            store.fetch("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        Store(tmp_path / "y.kvstore", remote_key=KEY)


def test_a_read_only_store_and_one_in_memory_fetch(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    with Store(tmp_path / "b.kvstore", fingerprint=FINGERPRINT):
        pass
    options: dict[str, Any] = {"fingerprint": FINGERPRINT, "remote": url, "remote_key": KEY}
    for path, readonly in ((tmp_path / "b.kvstore", True), (":memory:", False)):
        with Store(path, readonly=readonly, **options) as b:
            match = b.remote_match(tokens(PREFIX))
            assert match is not None
            assert same(b.fetch(match, 60), PREFIX)
    assert not (tmp_path / "b.kvstore-remote").exists()


def test_a_prefetch_fetches_what_is_new_and_learned(tmp_path: Path, url: str, a: Store) -> None:
    publish(a, PREFIX, entry_class="learned")
    publish(a, range(100))
    with machine(tmp_path, "b", url, remote_options={"prefetch_gib": 1}) as b:
        wait_for(lambda: b.match(tokens(PREFIX)) is not None)
        assert b.match(tokens(range(100))) is None, "a chat is not"
    with machine(tmp_path, "c", url, remote_options={"prefetch_gib": 1e-6}) as c:
        assert c.remote_match(tokens(PREFIX)) is not None
        settle(c)
        assert c.match(tokens(PREFIX)) is None, "the bound holds"

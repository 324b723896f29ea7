"""What fails, row by row, over SeaweedFS with a proxy before it that does harm."""

from __future__ import annotations

import logging
import os
import time
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
    Harm,
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

from kvstore import KVStoreError, RemoteDeniedError, RemoteError, Store
from kvstore.fleet.estimate import Breaker, LinkEstimate, renewal_chance
from kvstore.fleet.names import Names, parse_path

LARGE = 3000  # tokens whose state has 24 MiB, so that it goes in parts and comes in ranges


def metrics(store: Store) -> dict[str, float]:
    assert store.remote is not None
    return store.remote.metrics()


@pytest.mark.slow
def test_a_large_state_goes_in_parts_and_comes_in_ranges(tmp_path: Path, weed: str, harm: Harm, bucket: str) -> None:
    state = storekit.state(range(LARGE), row=2048)
    with machine(tmp_path, "a", bucket) as a:
        a.put(tokens(range(LARGE)), state, entry_class="learned")
        settle(a)
    assert any("uploadId" in line for line in harm.requests)
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(range(LARGE)))
        assert match is not None
        before = len(harm.requests)
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.main.tobytes() == state
        ranges = [line for line in harm.requests[before:] if line.startswith("GET") and "range:" in line.lower()]
        assert len(ranges) == 2


def test_a_small_state_takes_one_put_and_one_get(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    assert len([line for line in harm.requests if line.startswith(("PUT", "POST"))]) == 1
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        before = len(harm.requests)
        assert b.fetch(match, 60) is not None
        assert len(harm.requests) == before + 1


@pytest.mark.parametrize("mode", ["refuse", "503", "403"])
def test_a_store_that_is_down_opens_the_breaker_and_one_warning_says_so(
    tmp_path: Path, harm: Harm, bucket: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm.mode = mode
    with machine(tmp_path, "a", bucket) as a, caplog.at_level(logging.INFO):
        for n in range(3):
            a.put(tokens(range(n, n + 100)), storekit.state(range(n, n + 100)), entry_class="learned")
        wait_for(lambda: metrics(a)["remote_up"] == 0)
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING and r.name == "kvstore.fleet"]
        assert len(warnings) == 1
        assert bucket in warnings[0].getMessage()
        seen = len(harm.requests)
        assert a.remote_match(tokens(CHAT)) is None
        time.sleep(0.1)
        assert len(harm.requests) == seen, "it is left alone for a while"
        harm.mode = "ok"
        assert a.remote is not None
        a.remote.poll()
        assert metrics(a)["remote_up"] == 1
        wait_for(lambda: metrics(a)["remote_published_total"] == 3)
    assert "kvsecret" not in caplog.text


def test_the_command_says_that_credentials_are_denied(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        entry = a.put(tokens(PREFIX), storekit.state(PREFIX))
        harm.mode = "403"
        assert a.remote is not None
        with pytest.raises(RemoteDeniedError, match="denies"):
            a.remote.push(entry.id)
        harm.mode = "refuse"
        with pytest.raises(RemoteError) as caught:
            a.remote.push(entry.id)
        harm.mode = "ok"
    for secret in ("kvsecret", "Signature", "kvkey"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("at", [0, 1, 100, 300, 5_000, 40_000])
def test_an_answer_that_is_cut_is_a_miss(tmp_path: Path, harm: Harm, bucket: str, at: int) -> None:
    _cut(tmp_path, harm, bucket, [at])


@pytest.mark.slow
def test_an_answer_that_is_cut_anywhere_is_a_miss(tmp_path: Path, harm: Harm, bucket: str) -> None:
    _cut(tmp_path, harm, bucket, list(range(0, 80_000, 1600)))


def _cut(tmp_path: Path, harm: Harm, bucket: str, places: list[int]) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", bucket, publish="none") as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        for at in places:
            harm.mode = f"cut {at}"
            saved = b.fetch(match, 60)  # obstore asks twice more for what is missing
            assert saved is None or saved.main.tobytes() == storekit.state(PREFIX)
            assert saved is None or at > 80_000 // 3
            harm.mode = "ok"
            assert b.remote is not None
            b.remote.poll()
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.main.tobytes() == storekit.state(PREFIX)


def test_garbage_in_an_answer_is_refused_or_a_miss(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        harm.mode = "garbage"
        assert b.fetch(match, 60) is None
        harm.mode = "ok"
        assert b.match(tokens(PREFIX)) is None


def test_a_slow_store_is_given_up_and_estimated_lower(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        a.put(tokens(range(LARGE)), storekit.state(range(LARGE), row=2048), entry_class="learned")
        settle(a)
    with machine(tmp_path, "b", bucket) as b:
        assert b.remote is not None
        match = b.remote_match(tokens(range(LARGE)))
        assert match is not None
        decision = b.remote.decide(match, 500.0)  # 6 s of computing
        assert decision is not None
        assert decision.deadline == pytest.approx(4.5)
        harm.mode = "slow 4e6"
        before = metrics(b)["remote_bandwidth_bytes"]
        for _ in range(3):
            assert b.fetch(match, 0.3) is None
        assert metrics(b)["remote_gave_up_total"] == 3
        assert metrics(b)["remote_bandwidth_bytes"] <= before / 2
        harm.mode = "ok"
        b.remote.poll()
        assert b.remote.decide(match, 1e6) is None
        assert metrics(b)["remote_skipped_slow_total"] == 1


def test_an_upload_that_is_cut_off_is_never_visible_and_tried_again(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        assert a.remote_match(tokens(PREFIX)) is None
        harm.mode = "cut 0"
        a.put(tokens(PREFIX), storekit.state(PREFIX), entry_class="learned")
        wait_for(lambda: a.remote is not None and a.remote.client.breaker.failing)
        harm.mode = "ok"
        wait_for(lambda: metrics(a)["remote_published_total"] == 1)
    assert 1 <= len(listed(bucket)) <= 2  # the answer to a put that arrived may have been lost
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        assert b.fetch(match, 60) is not None


def test_a_publisher_whose_clock_is_wrong_corrects_it_by_its_first_object(
    tmp_path: Path, harm: Harm, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, off in (("behind", -7200.0), ("ahead", 7200.0)):
        with machine(tmp_path, name, f"{bucket}-{name}") as a, caplog.at_level(logging.WARNING):
            assert a.remote is not None
            client = a.remote.client
            client._clock = lambda off=off: time.time() + off  # type: ignore[misc]
            a.remote.poll(full=True)
            publish(a, PREFIX, entry_class="learned")
            a.remote.poll()
            assert client.offset == pytest.approx(-off, abs=120)
            assert client.now() == pytest.approx(time.time(), abs=120)
            publish(a, range(100), entry_class="learned")
            latest = max((name for path in listed(f"{bucket}-{name}") if (name := parse_path(path))), key=lambda n: -n.n_tokens)
            assert latest.named_at == pytest.approx(time.time(), abs=120)
    assert caplog.text.count("differ by") == 2


def test_a_reader_whose_clock_is_behind_corrects_it_by_what_it_lists(tmp_path: Path, harm: Harm, bucket: str) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", bucket) as b:
        assert b.remote is not None
        b.remote.client._clock = lambda: time.time() - 3 * 86400
        b.remote.poll(full=True)
        assert b.remote.client.now() == pytest.approx(time.time(), abs=300)
        assert b.remote_match(tokens(PREFIX)) is not None


def test_a_full_local_disk_serves_what_was_fetched_and_keeps_nothing(
    tmp_path: Path, harm: Harm, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    with machine(tmp_path, "b", bucket, cache_disk_mib=0.5, cache_ram_mib=0) as b, caplog.at_level(logging.WARNING):
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        saved = b.fetch(match, 60)
        assert saved is not None
        assert saved.main.tobytes() == storekit.state(PREFIX)
        settle(b)


def test_two_machines_that_publish_the_same_make_two_objects_of_which_one_is_used(
    tmp_path: Path, harm: Harm, bucket: str
) -> None:
    with machine(tmp_path, "a", bucket) as a:
        publish(a, PREFIX, entry_class="learned")
    (path,) = listed(bucket)
    name = parse_path(path)
    assert name is not None
    write_object(bucket, name.renamed(time.time() - 60).path, read_object(bucket, path))
    with machine(tmp_path, "b", bucket) as b:
        match = b.remote_match(tokens(PREFIX))
        assert match is not None
        delete_object(bucket, match.path)
        assert b.fetch(match, 60) is not None, "the other one is used"


# -- the rules, with a clock of their own


def test_a_fetch_pays_where_computing_takes_twice_its_estimate() -> None:
    link = LinkEstimate()
    assert link.seconds(50_000_000) == pytest.approx(1.15)
    decision = link.decide(50_000_000, 2.31)
    assert decision is not None
    assert decision.deadline == pytest.approx(0.75 * 2.31)
    assert link.decide(50_000_000, 2.29) is None
    # So a wrong guess costs at most 1.75 times computing.
    assert decision.deadline + 2.31 <= 1.75 * 2.31 + 1e-9


def test_estimates_follow_real_fetches() -> None:
    link = LinkEstimate()
    for _ in range(30):
        link.fetched(100_000_000, 1.0, 0.05)
        link.fetched(1000, 0.01, 0.001)
    assert link.latency == pytest.approx(0.01, rel=0.1)
    assert link.bandwidth == pytest.approx(1e8, rel=0.1)
    slow = link.bandwidth
    for _ in range(3):
        link.given_up(10**9, 0, 1.0)
    assert link.bandwidth == pytest.approx(slow / 2)
    for _ in range(2000):
        link.decide(10**9, 0.1)
    assert link.decide(10**9, 1.0) is not None or link.bandwidth > slow, "a link that was slow once is tried again"


def test_the_breaker_opens_after_three_failures_and_doubles_its_pause() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0], lambda: 0.5)
    assert [breaker.failed() for _ in range(2)] == [False, False]
    assert not breaker.open
    assert breaker.failed()
    pauses = []
    for _ in range(8):
        assert breaker.open
        assert not breaker.failed(), "reported once"
        started = now[0]
        while breaker.open:
            now[0] += 1
        pauses.append(now[0] - started)
        breaker.failed()
    assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]
    breaker.succeeded()
    assert breaker.up
    assert not breaker.open


def test_the_chance_of_a_renewal_rises_from_half_a_lifetime_to_three_quarters() -> None:
    assert renewal_chance(14.9, 30) == 0
    assert renewal_chance(15, 30) == pytest.approx(1 / 16)
    assert 1 / 16 < renewal_chance(18, 30) < 1
    assert renewal_chance(22.5, 30) == renewal_chance(100, 30) == 1


# -- an insider who has the key


def _heads() -> dict[str, Any]:
    return {
        "no JSON": b"hello",
        "a list": b"[1]",
        "nothing": b"{}",
        "deep": b"[" * 100_000,
    }


@pytest.mark.parametrize("what", list(_heads()))
def test_a_sealed_object_with_a_wrong_head_is_refused(tmp_path: Path, what: str) -> None:
    from kvstore.fleet import sealing

    url = f"file://{tmp_path}/bucket"
    names = Names(KEY, FINGERPRINT)
    name = names.name(
        names.chain(tokens(PREFIX)), at=time.time(), entry_class="learned", cuttable=True,
        state=names.state((bytes(16),)), parent=None,
    )  # fmt: skip
    head = _heads()[what]
    for parts in (
        [len(head).to_bytes(4, "little"), head, tokens(PREFIX), b"state"],
        [(1 << 31).to_bytes(4, "little"), head, tokens(PREFIX)],
        [b"\0"],
    ):
        raw = [memoryview(part).cast("B") if not isinstance(part, np.ndarray) else part.view(np.uint8) for part in parts]
        write_object(url, name.path, b"".join(sealing.seal(raw, KEY, name.sealed_name)))
        with machine(tmp_path, "b", url) as b:
            match = b.remote_match(tokens(PREFIX))
            assert match is not None
            assert b.fetch(match, 60) is None
            assert metrics(b)["remote_refused_total"] == 1
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(file := f"{tmp_path}/b.kvstore-remote{suffix}"):
                os.unlink(file)


def test_every_error_of_a_remote_is_one_of_kvstores() -> None:
    assert issubclass(RemoteError, KVStoreError)
    assert RemoteError.retry
    assert not RemoteDeniedError.retry

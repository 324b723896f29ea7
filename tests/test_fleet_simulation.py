"""A fleet by a virtual clock: skewed clocks, machines that lose their disks, requests that fail."""

from __future__ import annotations

import pytest
from fleetsim import Report, simulate


def check(report: Report) -> None:
    print(report)
    assert report.wrong == 0
    assert report.refused == 0
    assert report.orphans == 0
    assert report.hits > 0
    assert report.fetched > 0
    assert report.requests["COPY"] > 0, "what is used is renewed"
    assert report.failures > 0
    assert report.duplicates < 0.05 * report.published + 2


def test_a_small_fleet_for_a_week() -> None:
    check(simulate(40, 7))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_machines_for_a_week() -> None:
    report = simulate(10_000, 7, requests_a_day=3, chats=0.002)
    check(report)
    assert report.requests_per_client_hour < 5

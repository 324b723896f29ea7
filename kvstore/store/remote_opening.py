"""Opens the remote of a store. Imported only where there is one: what it needs is an extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..fleet.object_store import ObjectStore
from ..fleet.options import remote_options
from ..fleet.remote import Remote
from ..storage import db
from .core import StoreCore
from .fleet_link import FleetLink
from .write_behind import WriteBehind

Connect: TypeAlias = Callable[[StoreCore, WriteBehind, bool], Remote]


def prepare_remote(url: object, key: object, publish: str, options: object) -> Connect:
    """Checks all that can be wrong before a file is opened or created; what is given back opens the remote.

    Raises InvalidInputError, RemoteKeyError.
    """
    checked = remote_options(url, key, publish, options)
    store = ObjectStore(checked.url, checked.store_options)

    def connect(core: StoreCore, behind: WriteBehind, write_behind: bool) -> Remote:
        path = db.MEMORY if core.db.memory else core.db.path
        link = FleetLink(core, behind, write_behind)
        return Remote(checked, store, core.fingerprint, path, link, readonly=core.db.readonly)

    return connect

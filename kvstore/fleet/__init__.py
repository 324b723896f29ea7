"""The shared tier: machines of a fleet use each other's prefixes through an object store that exists already.

One object is one sealed state that never changes. Its name says what it holds, as keyed hashes of its tokens, so the listing
of the bucket is the index: publishing is one put, looking up is a query of a local file, and objects are deleted by age.
No server, no lock, no conditional request. `docs/fleet.md` tells how to use it.
"""

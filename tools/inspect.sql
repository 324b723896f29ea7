-- What is in a store, with nothing but the sqlite3 shell (3.40 or newer):
--
--     sqlite3 -readonly -box cache.db < tools/inspect.sql
--
-- or one query at a time, by copy. Nothing here changes the store; it may be in use meanwhile. Sizes are MiB.

-- All entries, last used first: `mib` as put, `stored_mib` on the disk; `used` is the time since the last restore.
SELECT id, tokens, mib, stored_mib, class, age, used, expires_in, parent, excerpt FROM ls;

-- One entry in full. Ids may be shortened: give the first digits. (Here: the entry used last.)
SELECT * FROM ls WHERE id LIKE substr((SELECT id FROM ls LIMIT 1), 1, 6) || '%';

-- The tree of every family: a whole entry, and below each what is stored as a delta against it. Bases are among them: entries
-- that are kept only because others need them.
SELECT * FROM tree;

-- The tree of one family. (Here: of the largest.)
SELECT * FROM tree WHERE family = (SELECT family FROM family_list LIMIT 1);

-- Families: entries that share a system block; how often one was stored, and how often a stored one served.
SELECT * FROM family_list;

-- What takes the space: `frees_mib` is what deleting the entry gives back, with all that is stored against it and the bases
-- that only it needs.
SELECT * FROM biggest LIMIT 20;

-- What was never used: never restored, and nothing was that is stored against it.
SELECT * FROM unused;

-- What was never used and is older than a week.
SELECT u.* FROM unused u JOIN meta m ON printf('%016x', m.entry) = u.id WHERE m.created_at < unixepoch() - 7 * 86400;

-- Not used for 30 days.
SELECT id, stored_mib, class, age, used, excerpt FROM ls WHERE last_used < datetime('now', 'localtime', '-30 days');

-- What expires next.
SELECT id, stored_mib, class, expires_in, expires, excerpt FROM ls WHERE expires IS NOT NULL ORDER BY expires LIMIT 20;

-- Sums by class, and what sharing saves.
SELECT * FROM savings;

-- Sums by fingerprint (model and context settings).
SELECT fingerprint, count(*) AS entries, round(sum(mib), 1) AS mib, round(sum(stored_mib), 1) AS stored_mib FROM ls GROUP BY 1;

-- The states: whole ('full') or deltas ('bkvd'), with their digests (XXH3-128).
SELECT * FROM parts LIMIT 20;

-- Hits, misses and evictions by cause, over the life of the file.
SELECT * FROM counters;

-- The file: its size, and how much of it is free for the next state.
SELECT round(page_count * page_size / 1048576.0, 1) AS file_mib, round(freelist_count * page_size / 1048576.0, 1) AS free_mib
FROM pragma_page_count, pragma_page_size, pragma_freelist_count;

-- Rows that a deletion by hand has left behind: they are never served, and go when the store is opened next.
SELECT 'meta' AS "table", count(*) AS orphans FROM meta WHERE entry NOT IN (SELECT id FROM entries)
UNION ALL SELECT 'blobs', count(*) FROM blobs WHERE entry NOT IN (SELECT id FROM entries)
UNION ALL SELECT 'chunks', count(*) FROM chunks WHERE blob NOT IN (SELECT id FROM blobs);

-- To delete an entry (without -readonly): all that is stored against it goes with it. Delete from `entries` and no other table:
--     DELETE FROM entries WHERE printf('%016x', id) LIKE '3f2a%';
-- All that was never used and is older than a week:
--     DELETE FROM entries WHERE printf('%016x', id) IN (SELECT id FROM unused)
--       AND id IN (SELECT entry FROM meta WHERE created_at < unixepoch() - 7 * 86400);
-- To keep an entry from eviction, or to make it expire in an hour:
--     UPDATE meta SET class = 'pinned', source = 'admin' WHERE printf('%016x', entry) LIKE '3f2a%';
--     UPDATE meta SET ttl = 3600, expires_at = unixepoch() + 3600 WHERE printf('%016x', entry) LIKE '3f2a%';

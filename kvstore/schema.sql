-- kvstore, schema version 3. This file creates an empty store; the views at the end are for the sqlite3 shell.
--
-- What must hold, always, in every committed state of the file (`kvstore verify` checks each by the name given):
--   whole-entry      an entry has one row in meta and one 'main' blob; a 'draft' blob is optional.
--   delta-parent     a blob of kind 'bkvd' belongs to an entry with a parent; that parent exists, has fewer tokens or is
--                    whole, and its state of the same part has the size and sample hash that the delta's header records. A chain
--                    of parents ends in a whole state.
--   base             an entry with base = 1 is kept only because others are stored against it: there is at least one. It is
--                    not listed, matched or counted, and goes with the last entry that needs it. meta.base is the same.
--   chunks-complete  the chunks of a blob that belongs to an entry are numbered 0..n-1 and add up to `stored` bytes.
--   digest           XXH3-128 of a blob's bytes as they were put is `digest`.
--   no-orphan        no row refers to an entry, blob or fingerprint that is not there.
--   staged           a blob without an entry is being written: its row names the writer. It is never served, and goes
--                    soon after its put failed, or its process ended.
--   totals           `totals` holds the sums over meta, those of bases in a row of their own.
--   cuts             an entry with cut_any = 0 and base = 0 has in `cuts` the token counts, short of the whole, that it can
--                    serve.
--   prefixes         an entry with cut_any = 0 and base = 0 has in `prefixes` its own token count and those of its cuts, no
--                    others, each with the hash of that many leading tokens, or NULL.
--
-- Ids are unsigned 64-bit integers, held as SQLite's signed ones: printf('%016x', id) shows them as everywhere else.
-- Times are unix seconds. Sizes are bytes. Tokens are int32, little-endian: in memcmp order the entries that share the
-- longest prefix with a token sequence are its neighbours, so entries_by_tokens is the prefix index.

PRAGMA application_id = 0x4B565356;  -- 'KVSV'

CREATE TABLE fingerprints(            -- model and context settings; states never cross from one to another
  id   INTEGER PRIMARY KEY,
  text TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE entries(
  id          INTEGER PRIMARY KEY CHECK(id <> 0),
  fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
  cut_any     INTEGER NOT NULL CHECK(cut_any IN (0, 1)),   -- 1: the state can be cut at any token
  n_tokens    INTEGER NOT NULL CHECK(n_tokens > 0),
  tokens      BLOB NOT NULL CHECK(length(tokens) = 4 * n_tokens),
  head        BLOB,                                        -- of the file it came in, tokens cut out; NULL: in no file
  base        INTEGER NOT NULL DEFAULT 0 CHECK(base IN (0, 1))   -- 1: only others need it
) STRICT;
CREATE INDEX entries_by_tokens ON entries(fingerprint, base, cut_any, tokens);

CREATE TABLE cuts(                    -- the token counts at which a state that cannot be cut anywhere can be cut
  id          INTEGER PRIMARY KEY,
  entry       INTEGER NOT NULL REFERENCES entries(id) ON DELETE CASCADE,
  fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
  n_tokens    INTEGER NOT NULL CHECK(n_tokens > 0),
  tokens      BLOB NOT NULL CHECK(length(tokens) = 4 * n_tokens)   -- the first n_tokens of the entry's
) STRICT;
CREATE INDEX cuts_by_tokens ON cuts(fingerprint, tokens);
CREATE INDEX cuts_by_entry ON cuts(entry);

CREATE TABLE meta(
  entry      INTEGER PRIMARY KEY REFERENCES entries(id) ON DELETE CASCADE,
  class      TEXT NOT NULL CHECK(class IN ('normal', 'learned', 'pinned')),
  source     TEXT NOT NULL CHECK(source IN ('default', 'request', 'policy', 'admin')),   -- who chose the class
  saved      INTEGER NOT NULL DEFAULT 0 CHECK(saved IN (0, 1)),      -- counted as saved in its family
  reused     INTEGER NOT NULL DEFAULT 0 CHECK(reused IN (0, 1)),     -- counted as reused in its family
  created_at INTEGER NOT NULL,
  last_used  INTEGER NOT NULL,
  use_order  INTEGER NOT NULL DEFAULT 0,               -- grows with each use: the order of eviction, whatever the clock does
  expires_at INTEGER,                                  -- NULL: never
  ttl        INTEGER CHECK(ttl > 0),                   -- NULL: none
  hits       INTEGER NOT NULL DEFAULT 0,               -- u64, held as the ids are
  family     INTEGER NOT NULL,                         -- u64: entries that share a system block
  n_input    INTEGER NOT NULL,                         -- input tokens of the request that made it
  n_images   INTEGER NOT NULL DEFAULT 0 CHECK(n_images >= 0),
  size       INTEGER NOT NULL CHECK(size > 0),         -- bytes as put, main and draft
  stored     INTEGER NOT NULL CHECK(stored > 0),       -- bytes in chunks, main and draft
  parent     INTEGER REFERENCES entries(id) ON DELETE CASCADE CHECK(parent <> entry),   -- NULL: stored whole
  excerpt    TEXT NOT NULL DEFAULT '',                 -- the start of the first user message
  base       INTEGER NOT NULL DEFAULT 0 CHECK(base IN (0, 1))    -- as in entries
) STRICT;
CREATE INDEX meta_by_parent ON meta(parent) WHERE parent IS NOT NULL;
CREATE INDEX meta_by_family ON meta(family) WHERE base = 0;
CREATE INDEX meta_by_use ON meta(class, use_order) WHERE base = 0;
CREATE INDEX meta_by_expiry ON meta(expires_at) WHERE expires_at IS NOT NULL AND base = 0;

CREATE TABLE blobs(
  id     INTEGER PRIMARY KEY AUTOINCREMENT,            -- never used again: a cache may go by it
  entry  INTEGER REFERENCES entries(id) ON DELETE CASCADE,   -- NULL: being written by `writer`
  part   TEXT NOT NULL CHECK(part IN ('main', 'draft')),
  kind   TEXT NOT NULL CHECK(kind IN ('full', 'bkvd')),
  size   INTEGER NOT NULL CHECK(size > 0),             -- bytes as put
  stored INTEGER NOT NULL CHECK(stored > 0),           -- bytes in chunks
  digest BLOB CHECK(length(digest) = 16),              -- XXH3-128 of the bytes as put, big-endian
  writer TEXT,
  sample INTEGER,                                      -- the hash that a delta against it records, held as the ids are
  UNIQUE(entry, part),
  CHECK(entry IS NULL OR digest IS NOT NULL),
  CHECK(entry IS NOT NULL OR writer IS NOT NULL)
) STRICT;
CREATE INDEX blobs_staged ON blobs(id) WHERE entry IS NULL;

CREATE TABLE chunks(                  -- a state may be larger than SQLite's largest BLOB
  id   INTEGER PRIMARY KEY,
  blob INTEGER NOT NULL REFERENCES blobs(id) ON DELETE CASCADE,
  seq  INTEGER NOT NULL CHECK(seq >= 0),
  data BLOB NOT NULL,
  UNIQUE(blob, seq)
) STRICT;

CREATE TABLE families(                -- how often a system block came by, and how often a stored state served it
  id     INTEGER PRIMARY KEY,
  saved  INTEGER NOT NULL DEFAULT 0,
  reused INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE counters(                -- over the life of the file: hits, misses, tokens served, evictions by cause
  name  TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE totals(                  -- by class; 'base' for entries with base = 1, whatever their class
  class   TEXT PRIMARY KEY,
  entries INTEGER NOT NULL,
  size    INTEGER NOT NULL,
  stored  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO totals VALUES('normal', 0, 0, 0), ('learned', 0, 0, 0), ('pinned', 0, 0, 0), ('base', 0, 0, 0);

CREATE TRIGGER meta_inserted AFTER INSERT ON meta BEGIN
  UPDATE totals SET entries = entries + 1, size = size + new.size, stored = stored + new.stored
    WHERE class = iif(new.base, 'base', new.class);
END;
CREATE TRIGGER meta_deleted AFTER DELETE ON meta BEGIN
  UPDATE totals SET entries = entries - 1, size = size - old.size, stored = stored - old.stored
    WHERE class = iif(old.base, 'base', old.class);
END;
CREATE TRIGGER meta_updated AFTER UPDATE OF class, size, stored, base ON meta BEGIN
  UPDATE totals SET entries = entries - 1, size = size - old.size, stored = stored - old.stored
    WHERE class = iif(old.base, 'base', old.class);
  UPDATE totals SET entries = entries + 1, size = size + new.size, stored = stored + new.stored
    WHERE class = iif(new.base, 'base', new.class);
END;

-- For people: ids in hex, sizes in MiB, times in words and as local dates. tools/inspect.sql shows how to use them.
CREATE VIEW ages AS                   -- `used`: since the last use; `expires_in` is NULL where an entry never expires
SELECT entry, CASE WHEN age < -60 THEN 'in the future' WHEN age < 120 THEN max(0, age) || ' s' WHEN age < 7200 THEN (age / 60) || ' min'
            WHEN age < 172800 THEN (age / 3600) || ' h' ELSE (age / 86400) || ' days' END AS age,
       CASE WHEN hits = 0 THEN 'never' ELSE CASE WHEN idle < -60 THEN 'in the future' WHEN idle < 120 THEN max(0, idle) || ' s'
            WHEN idle < 7200 THEN (idle / 60) || ' min'
            WHEN idle < 172800 THEN (idle / 3600) || ' h' ELSE (idle / 86400) || ' days' END END AS used,
       CASE WHEN left_s <= 0 THEN 'expired' ELSE CASE WHEN left_s < 120 THEN left_s || ' s' WHEN left_s < 7200 THEN (left_s / 60) || ' min'
            WHEN left_s < 172800 THEN (left_s / 3600) || ' h' ELSE (left_s / 86400) || ' days' END END
            || CASE WHEN left_s > ttl + 60 THEN ' (the clock was ahead)' ELSE '' END AS expires_in
FROM (SELECT entry, hits, ttl, unixepoch() - created_at AS age, unixepoch() - last_used AS idle,
             expires_at - unixepoch() AS left_s FROM meta);

CREATE VIEW ls AS
SELECT printf('%016x', e.id) AS id, e.n_tokens AS tokens, round(m.size / 1048576.0, 2) AS mib,
       round(m.stored / 1048576.0, 2) AS stored_mib, m.class, a.age, a.used, a.expires_in,
       CASE WHEN m.hits < 0 THEN printf('%u', m.hits) ELSE m.hits END AS hits,
       CASE WHEN m.parent IS NOT NULL THEN printf('%016x', m.parent) END AS parent, m.excerpt, m.source,
       datetime(m.created_at, 'unixepoch', 'localtime') AS created,
       datetime(m.last_used, 'unixepoch', 'localtime') AS last_used,
       datetime(m.expires_at, 'unixepoch', 'localtime') AS expires,
       printf('%016x', m.family) AS family, f.text AS fingerprint
FROM entries e JOIN meta m ON m.entry = e.id JOIN ages a ON a.entry = e.id JOIN fingerprints f ON f.id = e.fingerprint
WHERE m.base = 0
ORDER BY m.last_used DESC, m.use_order DESC;

CREATE VIEW tree AS                   -- families, in each the whole entries, below each those stored against it; and the bases
WITH RECURSIVE below(id, family, depth, path) AS (
  SELECT entry, family, 0, printf('%016x/%016x', family, entry) FROM meta
  WHERE parent IS NULL OR parent NOT IN (SELECT entry FROM meta)
  UNION ALL
  SELECT m.entry, b.family, b.depth + 1, b.path || printf('/%010d%016x', e.n_tokens, m.entry)
  FROM below b JOIN meta m ON m.parent = b.id JOIN entries e ON e.id = m.entry WHERE b.depth < 1000)
SELECT printf('%016x', m.family) AS family, replace(hex(zeroblob(b.depth)), '00', '  ') || printf('%016x', e.id) AS entry,
       e.n_tokens AS tokens, round(m.size / 1048576.0, 2) AS mib, round(m.stored / 1048576.0, 2) AS stored_mib,
       iif(m.base, 'base', m.class) AS class, m.excerpt
FROM below b JOIN entries e ON e.id = b.id JOIN meta m ON m.entry = b.id
ORDER BY b.path;

-- What deleting an entry gives back: its own bytes, those of all that is stored against it, and those of the bases that only
-- it needs. `children` are the entries that would go with it.
CREATE VIEW biggest AS
WITH RECURSIVE down(top, id) AS (
  SELECT entry, entry FROM meta WHERE base = 0
  UNION SELECT d.top, m.entry FROM down d JOIN meta m ON m.parent = d.id),
up(top, id) AS (
  SELECT entry, entry FROM meta WHERE base = 0
  UNION SELECT u.top, p.entry FROM up u JOIN meta m ON m.entry = u.id JOIN meta p ON p.entry = m.parent
  WHERE p.base = 1 AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = p.entry AND k.entry <> u.id)),
going(top, id) AS (SELECT top, id FROM down UNION SELECT top, id FROM up),
sums(top, children, stored) AS (
  SELECT g.top, sum(m.base = 0) - 1, sum(m.stored) FROM going g JOIN meta m ON m.entry = g.id GROUP BY g.top)
SELECT printf('%016x', m.entry) AS id, m.class, round(m.stored / 1048576.0, 2) AS stored_mib, s.children,
       round(s.stored / 1048576.0, 2) AS frees_mib,
       round(100.0 * s.stored / (SELECT sum(stored) FROM totals), 1) AS percent, a.age, a.used, m.excerpt
FROM sums s JOIN meta m ON m.entry = s.top JOIN ages a ON a.entry = s.top
ORDER BY s.stored DESC;

CREATE VIEW unused AS                 -- never restored, and nothing was that is stored against it
SELECT printf('%016x', e.id) AS id, e.n_tokens AS tokens, round(m.stored / 1048576.0, 2) AS stored_mib, m.class, a.age,
       a.expires_in, m.excerpt
FROM entries e JOIN meta m ON m.entry = e.id JOIN ages a ON a.entry = e.id
WHERE m.base = 0 AND m.hits = 0 AND NOT EXISTS (
  WITH RECURSIVE down(id) AS (
    SELECT entry FROM meta WHERE parent = e.id UNION SELECT k.entry FROM down d JOIN meta k ON k.parent = d.id)
  SELECT 1 FROM down d JOIN meta k ON k.entry = d.id WHERE k.base = 0 AND k.hits <> 0)
ORDER BY m.stored DESC;

CREATE VIEW family_list AS            -- entries that share a system block; saved and reused run over the life of the file
SELECT printf('%016x', m.family) AS family, sum(m.base = 0) AS entries,
       round(sum(iif(m.base, 0, m.size)) / 1048576.0, 2) AS mib,
       round(sum(m.stored) / 1048576.0, 2) AS stored_mib, coalesce(f.saved, 0) AS saved, coalesce(f.reused, 0) AS reused,
       min(m.excerpt) AS excerpt
FROM meta m LEFT JOIN families f ON f.id = m.family
GROUP BY m.family
ORDER BY sum(m.stored) DESC;

CREATE VIEW parts AS
SELECT printf('%016x', b.entry) AS id, b.part, b.kind, round(b.size / 1048576.0, 2) AS mib,
       round(b.stored / 1048576.0, 2) AS stored_mib, lower(hex(b.digest)) AS digest,
       (SELECT count(*) FROM chunks c WHERE c.blob = b.id) AS chunks
FROM blobs b WHERE b.entry IS NOT NULL
ORDER BY b.stored DESC;

CREATE VIEW savings AS
SELECT class, entries, round(iif(class = 'base', 0, size) / 1048576.0, 2) AS mib, round(stored / 1048576.0, 2) AS stored_mib,
       round((iif(class = 'base', 0, size) - stored) / 1048576.0, 2) AS shared_mib
FROM totals;

-- Additions. A file that lacks any of what stands below gets it when it is opened for writing, so every statement may run
-- again. It stands behind all other tables and indexes, because the tables of every file of this version then have the same
-- root pages.

-- What an entry that cannot be cut anywhere can serve: all of its tokens, or as many as a cut has. Triggers keep the rows,
-- whoever writes the file; the program computes the hash (NULL until then). A process that has read the rows up to some id
-- reads those above it to know what is new: a row whose entry gets another expiry is written anew.
CREATE TABLE IF NOT EXISTS prefixes(
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  entry       INTEGER NOT NULL REFERENCES entries(id) ON DELETE CASCADE,
  fingerprint INTEGER NOT NULL,
  n_tokens    INTEGER NOT NULL CHECK(n_tokens > 0),
  cut         INTEGER NOT NULL CHECK(cut IN (0, 1)),   -- 1: short of the whole, a row of cuts
  hash        INTEGER                                  -- 64 bits, of the first n_tokens; equal hashes are compared
) STRICT;
CREATE INDEX IF NOT EXISTS prefixes_by_entry ON prefixes(entry);
-- Which entries that can be cut, and which bases, are a prefix of a token sequence: by count and last tokens, for a put among
-- many that part one by one.
CREATE INDEX IF NOT EXISTS entries_by_end ON entries(fingerprint, n_tokens, substr(tokens, -64)) WHERE cut_any = 1 OR base = 1;
CREATE INDEX IF NOT EXISTS meta_by_last_used ON meta(last_used) WHERE base = 0;
CREATE INDEX IF NOT EXISTS meta_by_class ON meta(class) WHERE class <> 'normal' AND base = 0;

DROP TRIGGER IF EXISTS prefixes_of_entry;
CREATE TRIGGER prefixes_of_entry AFTER INSERT ON entries WHEN new.cut_any = 0 AND new.base = 0 BEGIN
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) VALUES(new.id, new.fingerprint, new.n_tokens, 0);
END;
DROP TRIGGER IF EXISTS prefixes_of_cut;
CREATE TRIGGER prefixes_of_cut AFTER INSERT ON cuts BEGIN
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) VALUES(new.entry, new.fingerprint, new.n_tokens, 1);
END;
DROP TRIGGER IF EXISTS prefixes_cut_deleted;
CREATE TRIGGER prefixes_cut_deleted AFTER DELETE ON cuts BEGIN
  DELETE FROM prefixes WHERE entry = old.entry AND cut = 1 AND n_tokens = old.n_tokens;
END;
DROP TRIGGER IF EXISTS prefixes_cut_updated;
CREATE TRIGGER prefixes_cut_updated AFTER UPDATE ON cuts BEGIN
  DELETE FROM prefixes WHERE entry = old.entry AND cut = 1 AND n_tokens = old.n_tokens;
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut) VALUES(new.entry, new.fingerprint, new.n_tokens, 1);
END;
DROP TRIGGER IF EXISTS prefixes_entry_updated;
CREATE TRIGGER prefixes_entry_updated AFTER UPDATE OF cut_any, fingerprint, n_tokens, tokens ON entries BEGIN
  INSERT INTO counters VALUES('put_off', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
  DELETE FROM prefixes WHERE entry = old.id;
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut)
    SELECT new.id, new.fingerprint, new.n_tokens, 0 WHERE new.cut_any = 0 AND new.base = 0
    UNION ALL SELECT entry, fingerprint, n_tokens, 1 FROM cuts WHERE entry = new.id AND new.cut_any = 0 AND new.base = 0;
END;
-- An entry that becomes a base serves nothing by itself any more.
DROP TRIGGER IF EXISTS entry_based;
CREATE TRIGGER entry_based AFTER UPDATE OF base ON entries WHEN new.base <> old.base BEGIN
  UPDATE meta SET base = new.base WHERE entry = new.id;
  DELETE FROM cuts WHERE entry = new.id AND new.base = 1;
  DELETE FROM prefixes WHERE entry = new.id;
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut)
    SELECT new.id, new.fingerprint, new.n_tokens, 0 WHERE new.cut_any = 0 AND new.base = 0
    UNION ALL SELECT entry, fingerprint, n_tokens, 1 FROM cuts WHERE entry = new.id AND new.cut_any = 0 AND new.base = 0;
  INSERT INTO counters SELECT 'put_off', 1 WHERE new.base = 0 ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS prefixes_expiry;
CREATE TRIGGER prefixes_expiry AFTER UPDATE OF expires_at ON meta WHEN old.expires_at IS NOT new.expires_at BEGIN
  INSERT INTO prefixes(entry, fingerprint, n_tokens, cut, hash)
    SELECT entry, fingerprint, n_tokens, cut, hash FROM prefixes WHERE entry = new.entry;
  DELETE FROM prefixes WHERE entry = new.entry
    AND id NOT IN (SELECT max(id) FROM prefixes WHERE entry = new.entry GROUP BY n_tokens);
END;

-- A process remembers where only expired entries are, until one of them may live again.
DROP TRIGGER IF EXISTS expiry_put_off;
CREATE TRIGGER expiry_put_off AFTER UPDATE OF expires_at ON meta
WHEN old.expires_at IS NOT NULL AND (new.expires_at IS NULL OR new.expires_at > old.expires_at) BEGIN
  INSERT INTO counters VALUES('put_off', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;

-- By hand: DELETE FROM entries WHERE printf('%016x', id) = '...' (or id = 0x...), from this table and no other.
-- All that is stored against an entry goes with it, at any depth, and so do the bases that nothing needs any more. The sqlite3
-- shell starts with foreign keys off: the triggers do there what ON DELETE CASCADE does elsewhere. Each walks the whole chain
-- in one statement, because a trigger does not call itself (and SQLite calls no more than 1,000 within each other).
DROP TRIGGER IF EXISTS entries_deleted;
CREATE TRIGGER entries_deleted BEFORE DELETE ON entries BEGIN
  DELETE FROM entries WHERE id IN (WITH RECURSIVE down(id) AS (
    SELECT entry FROM meta WHERE parent = old.id UNION SELECT m.entry FROM down d CROSS JOIN meta m ON m.parent = d.id)
    SELECT id FROM down);
END;
DROP TRIGGER IF EXISTS entry_gone;
CREATE TRIGGER entry_gone AFTER DELETE ON entries BEGIN
  DELETE FROM chunks WHERE blob IN (SELECT id FROM blobs WHERE entry = old.id);
  DELETE FROM blobs WHERE entry = old.id;
  DELETE FROM cuts WHERE entry = old.id;
  DELETE FROM prefixes WHERE entry = old.id;
  DELETE FROM meta WHERE entry = old.id;
END;
DROP TRIGGER IF EXISTS bases_gone;
CREATE TRIGGER bases_gone AFTER DELETE ON meta
WHEN EXISTS (SELECT 1 FROM meta WHERE entry = old.parent AND base = 1)
  AND NOT EXISTS (SELECT 1 FROM entries WHERE id = old.entry) BEGIN
  DELETE FROM entries WHERE id IN (WITH RECURSIVE up(id) AS (
    SELECT entry FROM meta m WHERE entry = old.parent AND base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> old.entry)
    UNION SELECT m.entry FROM up u CROSS JOIN meta x ON x.entry = u.id CROSS JOIN meta m ON m.entry = x.parent WHERE m.base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> u.id)) SELECT id FROM up);
  DELETE FROM chunks WHERE blob IN (SELECT id FROM blobs WHERE entry IN (WITH RECURSIVE up(id) AS (
    SELECT entry FROM meta m WHERE entry = old.parent AND base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> old.entry)
    UNION SELECT m.entry FROM up u CROSS JOIN meta x ON x.entry = u.id CROSS JOIN meta m ON m.entry = x.parent WHERE m.base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> u.id)) SELECT id FROM up));
  DELETE FROM blobs WHERE entry IN (WITH RECURSIVE up(id) AS (
    SELECT entry FROM meta m WHERE entry = old.parent AND base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> old.entry)
    UNION SELECT m.entry FROM up u CROSS JOIN meta x ON x.entry = u.id CROSS JOIN meta m ON m.entry = x.parent WHERE m.base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> u.id)) SELECT id FROM up);
  DELETE FROM meta WHERE entry IN (WITH RECURSIVE up(id) AS (
    SELECT entry FROM meta m WHERE entry = old.parent AND base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> old.entry)
    UNION SELECT m.entry FROM up u CROSS JOIN meta x ON x.entry = u.id CROSS JOIN meta m ON m.entry = x.parent WHERE m.base = 1
      AND NOT EXISTS (SELECT 1 FROM meta k WHERE k.parent = m.entry AND k.entry <> u.id)) SELECT id FROM up);
END;

-- What else is done by hand may leave rows that refer to nothing. Where it does, 'unswept' in `counters` grows: the next sweep
-- looks at every row, and takes it away. With foreign keys, and for whole entries without them, none of these fires.
DROP TRIGGER IF EXISTS unswept_blob_deleted;
CREATE TRIGGER unswept_blob_deleted AFTER DELETE ON blobs
WHEN EXISTS (SELECT 1 FROM chunks WHERE blob = old.id)
  OR (old.part = 'main' AND EXISTS (SELECT 1 FROM entries WHERE id = old.entry)) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_chunk_deleted;
CREATE TRIGGER unswept_chunk_deleted AFTER DELETE ON chunks
WHEN EXISTS (SELECT 1 FROM blobs WHERE id = old.blob AND entry IS NOT NULL
  AND EXISTS (SELECT 1 FROM entries WHERE id = blobs.entry)) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_meta_deleted;
CREATE TRIGGER unswept_meta_deleted AFTER DELETE ON meta WHEN EXISTS (SELECT 1 FROM entries WHERE id = old.entry)
  AND (old.parent IS NULL OR EXISTS (SELECT 1 FROM entries WHERE id = old.parent)) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_fingerprint_deleted;
CREATE TRIGGER unswept_fingerprint_deleted AFTER DELETE ON fingerprints BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_chunk_written;
CREATE TRIGGER unswept_chunk_written AFTER INSERT ON chunks WHEN NOT EXISTS (SELECT 1 FROM blobs WHERE id = new.blob) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_meta_written;
CREATE TRIGGER unswept_meta_written AFTER INSERT ON meta WHEN NOT EXISTS (SELECT 1 FROM entries WHERE id = new.entry) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_blob_written;
CREATE TRIGGER unswept_blob_written AFTER INSERT ON blobs
WHEN new.entry IS NOT NULL AND NOT EXISTS (SELECT 1 FROM entries WHERE id = new.entry) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_cut_written;
CREATE TRIGGER unswept_cut_written AFTER INSERT ON cuts WHEN NOT EXISTS (SELECT 1 FROM entries WHERE id = new.entry) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_chunk_moved;
CREATE TRIGGER unswept_chunk_moved AFTER UPDATE OF blob, seq ON chunks BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_blob_moved;
CREATE TRIGGER unswept_blob_moved AFTER UPDATE OF id, entry, part ON blobs
WHEN new.id <> old.id OR new.part <> old.part OR (new.entry <> old.entry) OR (new.entry IS NULL AND new.writer <> '') BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_meta_moved;
CREATE TRIGGER unswept_meta_moved AFTER UPDATE OF entry, parent ON meta
WHEN new.entry <> old.entry OR (new.parent IS NOT NULL AND NOT EXISTS (SELECT 1 FROM entries WHERE id = new.parent)) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_entry_moved;
CREATE TRIGGER unswept_entry_moved AFTER UPDATE OF id, fingerprint ON entries BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_fingerprint_moved;
CREATE TRIGGER unswept_fingerprint_moved AFTER UPDATE OF id ON fingerprints BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;
DROP TRIGGER IF EXISTS unswept_cut_moved;
CREATE TRIGGER unswept_cut_moved AFTER UPDATE OF entry ON cuts WHEN NOT EXISTS (SELECT 1 FROM entries WHERE id = new.entry) BEGIN
  INSERT INTO counters VALUES('unswept', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1;
END;

PRAGMA user_version = 3;

"""How far a preparation is, and which documents it has seen: one SQLite file.

State and seen documents change in one transaction, so that a process that is killed continues from
a moment at which both were right. Documents are kept on disk, not in memory: 16 bytes of a hash
each, and for near-duplicates a signature of 512 bytes and its band keys.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.data.duplicates import band_keys, bands, similarity
from jaxlm.errors import UserError

_TABLES = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY, source INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signatures (id INTEGER PRIMARY KEY, source INTEGER, signature BLOB);
CREATE TABLE IF NOT EXISTS bands (key BLOB, id INTEGER, PRIMARY KEY (key, id)) WITHOUT ROWID;
"""
_CACHE_KIB = 200_000  # of pages; about five million hashes stay in memory
_SETTLED = -1  # number of the source of documents that are never forgotten


class Journal:
    """State by key, and the documents seen, with commits.

    Args:
        path: the file; made if it is not there.

    Raises:
        UserError: the file is damaged.
    """

    def __init__(self, path: Path):
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._database.executescript(_TABLES)
            self._database.execute("BEGIN")
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{path}: damaged ({error}); remove {path.parent} and prepare the data again"
            ) from None

    def __getitem__(self, key: str) -> Any:
        row = self._database.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def __setitem__(self, key: str, value: Any) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value))
        )

    def commit(self) -> None:
        """Make all changes since the last commit permanent."""
        self._database.execute("COMMIT")
        self._database.execute("BEGIN")

    def rollback(self) -> None:
        """Undo all changes since the last commit."""
        self._database.execute("ROLLBACK")
        self._database.execute("BEGIN")

    def is_new(self, digest: bytes, source: int) -> bool:
        """Note a document by its digest; False if it was there."""
        cursor = self._database.execute(
            "INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, source)
        )
        return cursor.rowcount == 1

    def is_unlike_all(self, signature: np.ndarray, threshold: float, source: int) -> bool:
        """Note a document by its MinHash signature; False if one as similar was there."""
        keys = band_keys(signature, *bands(threshold))
        marks = ", ".join("?" * len(keys))
        candidates = self._database.execute(
            "SELECT signature FROM signatures WHERE id IN "
            f"(SELECT id FROM bands WHERE key IN ({marks}))",
            keys,
        )
        for (other,) in candidates:
            if similarity(signature, np.frombuffer(other, signature.dtype)) >= threshold:
                return False
        cursor = self._database.execute(
            "INSERT INTO signatures (source, signature) VALUES (?, ?)",
            (source, signature.tobytes()),
        )
        self._database.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, cursor.lastrowid) for key in keys]
        )
        return True

    def forget(self, source: int) -> None:
        """Remove all documents that came from a source."""
        self._database.execute("DELETE FROM seen WHERE source = ?", (source,))
        self._database.execute(
            "DELETE FROM bands WHERE id IN (SELECT id FROM signatures WHERE source = ?)", (source,)
        )
        self._database.execute("DELETE FROM signatures WHERE source = ?", (source,))

    def settle(self) -> None:
        """Let :meth:`forget` no longer remove any of the documents so far."""
        for table in ("seen", "signatures"):
            self._database.execute(f"UPDATE {table} SET source = {_SETTLED} WHERE source >= 0")

    def close(self) -> None:
        """Close the file; what was not committed is undone."""
        self._database.execute("ROLLBACK")
        self._database.close()

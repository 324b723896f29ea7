"""Bytes and rows: the file of a store, without policy."""
